"""The header of a GGUF file: metadata that must be checked before loading, and the list of tensors."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cppbatch.errors import ModelError
from cppbatch.llama.library import ggml


class _InitParams(ctypes.Structure):
    """ggml's `gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS: llama.cpp aborts the process for more, and for 0
_MAX_CONTEXT = 1 << 30  # tokens; positions are int32
_STRING = 8  # gguf_type
_NUMBERS = {4: ("u32", ctypes.c_uint32), 5: ("i32", ctypes.c_int32), 6: ("f32", ctypes.c_float),
            10: ("u64", ctypes.c_uint64), 11: ("i64", ctypes.c_int64), 12: ("f64", ctypes.c_double)}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    offset: int
    """Bytes from the start of the tensor data."""
    n_bytes: int


def check_metadata(path: Path) -> None:
    """Raises `ModelError` for metadata with which llama.cpp aborts the process or computes nonsense.

    A file that is not GGUF passes: llama.cpp reports the reason when it loads it.
    """
    try:
        with _header(path) as (lib, header):
            numbers = dict(_numbers(lib, header))
    except ModelError:
        return
    for key, value in numbers.items():
        _, _, name = key.partition(".")
        if name == "block_count" and not 1 <= value <= _MAX_LAYERS:
            wanted = f"it must be from 1 to {_MAX_LAYERS} layers"
        elif name == "context_length" and not 1 <= value <= _MAX_CONTEXT:
            wanted = f"it must be from 1 to {_MAX_CONTEXT} tokens"
        elif name.endswith("_epsilon") and not 0 <= value < math.inf:
            wanted = "it must be 0 or more"
        elif name.endswith("rope.freq_base") and not 0 < value < math.inf:
            wanted = "it must be above 0"
        else:
            continue
        raise ModelError(f"{path} is damaged: {key} is {value}; {wanted}. Download it again")


def architecture_of(path: Path) -> str | None:
    """The architecture in a file: "llama"; "clip" for a projector for images or audio. None if it is missing.

    Reads only the header. Raises `ModelError` if that fails.
    """
    return text_of(path, "general.architecture")


def text_of(path: Path, key: str) -> str | None:
    """A text in a file's metadata; None if the key is missing. Raises `ModelError` if the file cannot be read."""
    with _header(path) as (lib, header):
        return _text(lib, header, key)


def number_of(path: Path, key: str) -> float | None:
    """A number in the metadata of a file's architecture; None if the key is missing. Raises as `text_of`."""
    with _header(path) as (lib, header):
        return dict(_numbers(lib, header)).get(key)


def _text(lib: ctypes.CDLL, header: int, key: str) -> str | None:
    lib.gguf_get_kv_type.argtypes, lib.gguf_get_kv_type.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int
    lib.gguf_find_key.argtypes, lib.gguf_find_key.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_int64
    lib.gguf_get_val_str.argtypes, lib.gguf_get_val_str.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_char_p
    index = lib.gguf_find_key(header, key.encode())
    if index < 0 or lib.gguf_get_kv_type(header, index) != _STRING:
        return None
    text: str = lib.gguf_get_val_str(header, index).decode("utf-8", "replace")
    return text


def _numbers(lib: ctypes.CDLL, header: int) -> Iterator[tuple[str, float]]:
    """The numeric metadata of the model's architecture: keys ("llama.block_count") and values."""
    lib.gguf_get_n_kv.argtypes, lib.gguf_get_n_kv.restype = [ctypes.c_void_p], ctypes.c_int64
    lib.gguf_get_key.argtypes, lib.gguf_get_key.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_char_p
    architecture = _text(lib, header, "general.architecture")
    if architecture is None:
        return
    prefix = f"{architecture}."
    for i in range(lib.gguf_get_n_kv(header)):
        key = lib.gguf_get_key(header, i).decode("utf-8", "replace")
        if key.startswith(prefix) and (kind := _NUMBERS.get(lib.gguf_get_kv_type(header, i))):
            get = getattr(lib, f"gguf_get_val_{kind[0]}")
            get.argtypes, get.restype = [ctypes.c_void_p, ctypes.c_int64], kind[1]
            yield key, get(header, i)


def has_tensor(path: Path, *names: str) -> bool:
    """Whether the file contains any of these tensors. Reads only the header. Raises `ModelError` if that fails."""
    with _header(path) as (lib, header):
        return any(lib.gguf_find_tensor(header, name.encode()) >= 0 for name in names)


def list_tensors(path: Path) -> list[Tensor]:
    """All tensors of a file, in file order. Reads only the header. Raises `ModelError` if that fails."""
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
        raise ModelError(f"{path} cannot be read as a GGUF file")
    try:
        yield lib, header
    finally:
        lib.gguf_free(header)
