"""Which tensors a GGUF file has: a loaded model does not tell."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from cppbatch.errors import ModelError
from cppbatch.llama.library import ggml


class _InitParams(ctypes.Structure):
    """ggml's `gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def has_tensor(path: Path, *names: str) -> bool:
    """Whether the file has one of these. Reads its header alone. Raises `ModelError` when it cannot."""
    lib = ggml()
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_find_tensor.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    lib.gguf_find_tensor.restype = ctypes.c_int64
    lib.gguf_free.argtypes, lib.gguf_free.restype = [ctypes.c_void_p], None
    header = lib.gguf_init_from_file(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
    if not header:
        raise ModelError(f"{path} cannot be read any more")
    try:
        return any(lib.gguf_find_tensor(header, name.encode()) >= 0 for name in names)
    finally:
        lib.gguf_free(header)
