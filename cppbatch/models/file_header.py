"""The header of a GGUF file: its metadata, and the name, type and shape of every tensor.

The gguf package makes an array of every token, which takes seconds for a large vocabulary; this takes milliseconds.
The gguf package is not even imported for its table of types, which takes as long as reading ten headers.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cppbatch.errors import ModelError
from cppbatch.findings import file_stamp
from cppbatch.models.find import check_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # gguf types
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_MOST_READ = 16  # headers that are kept


class WeightType(NamedTuple):
    """A type of weights, as ggml stores them (`ggml_type`)."""

    number: int
    """In files."""
    block: int
    """Weights per block."""
    n_bytes: int
    """Bytes per block."""


WEIGHT_TYPES = {name: WeightType(*each) for name, each in {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q8_1": (9, 32, 40), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "Q8_K": (15, 256, 292),
    "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136),
    "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8), "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56), "BF16": (30, 1, 2), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18),
}.items()}  # fmt: skip
"""By ggml's names: those of `gguf.GGMLQuantizationType`, with the sizes of `gguf.GGML_QUANT_SIZES`."""

_NAMES = {each.number: name for name, each in WEIGHT_TYPES.items()}


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
    """The part of a GGUF file before the weights."""

    metadata: dict[str, Any]
    """Numbers, booleans, texts, and tuples of numbers; for an array of texts, its length."""
    tensors: list[TensorInfo]

    def text(self, key: str) -> str | None:
        """A text of the metadata. None if it is missing, or of another type in a damaged file: loading reports that."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def whole_number(self, key: str) -> int | None:
        """As `text`, for an integer of 0 or more."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and value >= 0 else None


def read_header(path: Path) -> FileHeader:
    """Reads the header, once per unchanged file. Raises `ModelError` if the file is not GGUF, damaged, or truncated.

    The result is shared and must not be modified.
    """
    check_file(path)
    return _read(path, file_stamp(path))


@functools.lru_cache(_MOST_READ)
def _read(path: Path, _stamp: tuple[int, ...]) -> FileHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (ValueError, ArithmeticError, OSError, struct.error) as error:
        raise ModelError(f"{path} is damaged or truncated ({error}). Download it again") from error


def read_integers(path: Path, name: str) -> npt.NDArray[np.int64]:
    """The numbers of a tensor of the type I64. Raises `ModelError` as `read_header`, and if the file has none."""
    import numpy as np  # slower than reading a header, which does not need it

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        tensors = reader.header().tensors
        found = next((t for t in tensors if (t.name, t.kind) == (name, "I64")), None)
        if found is None:
            raise ModelError(f"{path} has no tensor {name} of type I64")
        start = reader.starts[name]
        return np.frombuffer(data[start : start + 8 * found.n_elements], reader.order + "i8").astype(np.int64)


class _Reader:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4
        self.starts: dict[str, int] = {}
        """The start of each tensor in the file, once `header` has been read."""
        little = (
            struct.unpack_from("<I", data, 4)[0] & 0xFFFF
        )  # the version; a file of the other byte order has it last
        self.order = "<" if little else ">"

    def header(self) -> FileHeader:
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"unknown version {version}")
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
        """A tensor, and its end in the weights section; `starts` has its start there."""
        name = self._text()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        number, offset = self._number("I"), self._number("Q")
        self.starts[name] = offset
        if (kind := _NAMES.get(number)) is None:  # newer than `WEIGHT_TYPES`
            return TensorInfo(name, f"type {number}", shape), offset
        of_kind = WEIGHT_TYPES[kind]
        return TensorInfo(name, kind, shape), offset + math.prod(shape) // of_kind.block * of_kind.n_bytes

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
