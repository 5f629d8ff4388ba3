"""The header of a GGUF file: its metadata, and the name, type and shape of every tensor.

The gguf package makes an array of every token, which takes seconds for a large vocabulary; this takes milliseconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES

from cppbatch.errors import ModelError
from cppbatch.models.find import check_file

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # gguf types
_STRING, _ARRAY = 8, 9
_TYPES = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
_SIZES = {kind.name: size for kind, size in GGML_QUANT_SIZES.items()}
_ALIGNMENT = 32


class TensorInfo(NamedTuple):
    """A tensor."""

    name: str
    kind: str
    """ggml's name of its type: "Q4_K"."""
    shape: tuple[int, ...]
    """In ggml's order: a matrix has (columns, rows)."""

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


class FileHeader(NamedTuple):
    """What stands in a GGUF file before the weights."""

    metadata: dict[str, Any]
    """Numbers, truth values, texts, and tuples of numbers. Of an array of texts: its length."""
    tensors: list[TensorInfo]


def read_header(path: Path) -> FileHeader:
    """Reads the header. Raises `ModelError` if the file is not GGUF, damaged, or cut off."""
    check_file(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (ValueError, ArithmeticError, OSError, struct.error) as error:
        raise ModelError(f"{path} is damaged or cut off ({error}). Download it again") from error


def read_integers(path: Path, name: str) -> npt.NDArray[np.int64]:
    """The numbers of a tensor of the type I64. Raises `ModelError` as `read_header`, and if the file has none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        tensors = reader.header().tensors
        found = next((t for t in tensors if (t.name, t.kind) == (name, "I64")), None)
        if found is None:
            raise ModelError(f"{path} has no tensor {name} of the type I64")
        start = reader.starts[name]
        return np.frombuffer(data[start : start + 8 * found.n_elements], reader.order + "i8").astype(np.int64)


class _Reader:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4
        self.starts: dict[str, int] = {}
        """Where each tensor begins in the file, once `header` was read."""
        little = (
            struct.unpack_from("<I", data, 4)[0] & 0xFFFF
        )  # the version; a file of the other byte order has it last
        self.order = "<" if little else ">"

    def header(self) -> FileHeader:
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"version {version} is not known")
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        tensors = [self._tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int):
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        if tensors and (end := start + max(end for _, end in tensors)) > len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes, its weights end at {end}")
        self.starts = {name: start + offset for name, offset in self.starts.items()}
        return FileHeader(metadata, [tensor for tensor, _ in tensors])

    def _tensor(self) -> tuple[TensorInfo, int]:
        """A tensor, and where it ends in the part with the weights; `starts` has where it begins there."""
        name = self._text()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        number, offset = self._number("I"), self._number("Q")
        self.starts[name] = offset
        if (kind := _TYPES.get(number)) is None:  # newer than the gguf package
            return TensorInfo(name, f"type {number}", shape), offset
        block, n_bytes = _SIZES[kind]
        return TensorInfo(name, kind, shape), offset + math.prod(shape) // block * n_bytes

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            kind, n = self._number("I"), self._number("Q")
            return self._skip_texts(n) if kind == _STRING else self._numbers(n, self._format(kind))
        return self._number(self._format(kind))

    def _skip_texts(self, n: int) -> int:
        length, data, at = struct.Struct(self.order + "Q").unpack_from, self._data, self._at
        for _ in range(n):
            at += 8 + length(data, at)[0]
        self._at = at
        return n

    def _numbers(self, n: int, kind: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"{self.order}{n}{kind}", self._data, self._at)
        self._at += n * struct.calcsize("=" + kind)
        return values

    def _text(self) -> str:
        n = self._number("Q")
        if n > len(self._data) - self._at:
            raise ValueError(f"a text of {n} bytes")
        start, self._at = self._at, self._at + n
        return self._data[start : self._at].decode("utf-8", "replace")

    def _number(self, kind: str) -> Any:
        return self._numbers(1, kind)[0]

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind}")
        return _NUMBERS[kind]
