"""Which tensors a GGUF file has: a loaded model does not tell."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cppbatch.errors import ModelError
from cppbatch.llama.library import ggml


class _InitParams(ctypes.Structure):
    """ggml's `gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class Tensor(NamedTuple):
    """A tensor in a file."""

    name: str
    offset: int
    """Bytes from the start of the file's data."""
    n_bytes: int


def has_tensor(path: Path, *names: str) -> bool:
    """Whether the file has one of these. Reads its header alone. Raises `ModelError` when it cannot."""
    with _header(path) as (lib, header):
        return any(lib.gguf_find_tensor(header, name.encode()) >= 0 for name in names)


def list_tensors(path: Path) -> list[Tensor]:
    """All tensors of a file, in its order. Reads its header alone. Raises `ModelError` when it cannot."""
    with _header(path) as (lib, header):
        return [
            Tensor(
                lib.gguf_get_tensor_name(header, i).decode("utf-8", "replace"),
                lib.gguf_get_tensor_offset(header, i),
                lib.gguf_get_tensor_size(header, i),
            )
            for i in range(lib.gguf_get_n_tensors(header))
        ]


@contextlib.contextmanager
def _header(path: Path) -> Iterator[tuple[ctypes.CDLL, int]]:
    lib = ggml()
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_find_tensor.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    lib.gguf_find_tensor.restype = lib.gguf_get_n_tensors.restype = ctypes.c_int64
    lib.gguf_get_n_tensors.argtypes = [ctypes.c_void_p]
    for name, restype in (("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("size", ctypes.c_size_t)):
        function = getattr(lib, f"gguf_get_tensor_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], restype
    lib.gguf_free.argtypes, lib.gguf_free.restype = [ctypes.c_void_p], None
    header = lib.gguf_init_from_file(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
    if not header:
        raise ModelError(f"{path} cannot be read any more")
    try:
        yield lib, header
    finally:
        lib.gguf_free(header)
