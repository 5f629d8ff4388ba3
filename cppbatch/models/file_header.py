"""The header of a GGUF file: its metadata, and the name, type and shape of every tensor.

The gguf package makes an array of every token, which takes seconds for a large vocabulary; this takes milliseconds.
The gguf package is not even imported for its table of types, which takes as long as reading ten headers.

A file in a models folder may be anything, so its header is read within the bounds below, which also bound the time.
It is not mapped into memory: reading a mapped file that another program truncates ends the process.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from cppbatch.errors import ModelError
from cppbatch.findings import file_stamp, finding_key, finding_path, read_finding, write_finding
from cppbatch.models.find import check_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VALUE_TYPES = ("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "FLOAT32", "BOOL", "STRING", "ARRAY", "UINT64",
               "INT64", "FLOAT64")  # fmt: skip
"""GGUF's types of metadata values, by their number in files."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = VALUE_TYPES.index("STRING"), VALUE_TYPES.index("ARRAY")

_MOST_BYTES = 128 << 20  # of a header; with 262,144 tokens and their merges it has 15 MB
_MOST_KEYS, _MOST_TENSORS = 4096, 16_384  # llama.cpp compares the name of each with those of all others
_MOST_TEXTS = 4_000_000  # in arrays; skipping them takes half a second
_MOST_DIMENSIONS, _LONGEST_NAME, _MOST_ELEMENTS = 4, 63, 2**63 - 1  # ggml's


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

FILE_TYPES = {number: name for names in (
    {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M"},
    {13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS"},
    {21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S"},
    {29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4"},
    {40: "Q1_0"},
) for number, name in names.items()}  # fmt: skip
"""llama.cpp's names of file types, by the number in the metadata (`general.file_type`): which mix of weight types."""

_NAMES = {each.number: name for name, each in WEIGHT_TYPES.items()}


class TensorInfo(NamedTuple):
    """A tensor."""

    name: str
    kind: str
    """ggml's name of its type: "Q4_K"."""
    shape: tuple[int, ...]
    """In ggml's order: a matrix has (columns, rows)."""
    offset: int = 0
    """Bytes from the start of the weights in the file."""

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights; a lower bound for a type that is not in `WEIGHT_TYPES`."""
        of_kind = WEIGHT_TYPES.get(self.kind)
        return self.n_blocks * of_kind.n_bytes if of_kind else self.n_elements // 8

    @property
    def n_blocks(self) -> int:
        """Number of blocks of weights; that of weights for a type that is not in `WEIGHT_TYPES`."""
        of_kind = WEIGHT_TYPES.get(self.kind)
        return self.n_elements // of_kind.block if of_kind else self.n_elements


class FileHeader(NamedTuple):
    """The part of a GGUF file before the weights."""

    metadata: dict[str, Any]
    """Numbers, booleans, texts, and tuples of numbers; for an array of texts or of more than 4,096 numbers, its length;
    for a text of more than 1 MiB, None."""
    tensors: list[TensorInfo]
    value_types: Mapping[str, str] = MappingProxyType({})
    """The types of the metadata's values (`VALUE_TYPES`)."""

    def text(self, key: str) -> str | None:
        """A text of the metadata. None if it is missing, or of another type in a damaged file: loading reports that."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def whole_number(self, key: str) -> int | None:
        """An integer of 0 or more in the metadata; None if it is missing or of another type."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and value >= 0 else None


def read_header(path: Path) -> FileHeader:
    """Reads the header, once per unchanged file. Raises `ModelError` if the file is not GGUF, damaged, or truncated.

    The result is shared and must not be modified.
    """
    check_file(path)
    return _read(path, file_stamp(path))


@functools.lru_cache(16)
def _read(path: Path, _stamp: tuple[int, ...]) -> FileHeader:
    try:
        with path.open("rb") as file:
            reader = _Reader(file)
            # the header of a large file is a finding: 262,144 tokens and their merges take 0.08 s to skip
            if reader.size < 64 << 20:
                return reader.header()
            kept = finding_path("headers", finding_key(Path(__file__).parent, [path]))
            if found := read_finding(kept, FileHeader):
                return _with_tuples(found)
            header = reader.header()
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is damaged or truncated ({error}). Download it again") from error
    if _with_tuples(msgspec.json.decode(msgspec.json.encode(header), type=FileHeader)) == header:  # no infinite number
        write_finding(kept, header)
    return header


def _with_tuples(header: FileHeader) -> FileHeader:
    """A header whose arrays were lists in JSON."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in header.metadata.items()}
    return header._replace(metadata=values)


def read_before_weights(file: BinaryIO, n_bytes: int) -> bytes:
    """The start of a GGUF file of `n_bytes` up to its weights; of `file` no more is read. Raises `ModelError`."""
    try:
        return _Reader(file, n_bytes).before_weights()
    except (ValueError, OSError) as error:
        raise ModelError(f"it is not a GGUF file, or damaged ({error})") from error


def read_integers(path: Path, name: str) -> npt.NDArray[np.int64]:
    """The numbers of a tensor of the type I64. Raises `ModelError` as `read_header`, and if the file has none."""
    import numpy as np  # slower than reading a header, which does not need it

    return _read_tensor(path, name, "I64", "i8").astype(np.int64)


def read_floats(path: Path, name: str) -> npt.NDArray[np.float32]:
    """The numbers of a tensor of the type F32. Raises as `read_integers`."""
    import numpy as np

    return _read_tensor(path, name, "F32", "f4").astype(np.float32)


def _read_tensor(path: Path, name: str, kind: str, number: str) -> npt.NDArray[Any]:
    import numpy as np

    found = next((t for t in read_header(path).tensors if (t.name, t.kind) == (name, kind)), None)
    if found is None:
        raise ModelError(f"{path} has no tensor {name} of type {kind}")
    with path.open("rb") as file:
        reader = _Reader(file)
        reader.header()
        file.seek(reader.weights_start + found.offset)
        return np.frombuffer(file.read(found.n_bytes), reader.order + number)


class _Reader:
    """Reads values one after the other. Raises ValueError for what no file of a model contains."""

    def __init__(self, file: BinaryIO, size: int | None = None) -> None:
        """`size`: of the file, if `file` is not one of the system."""
        self._file, self.size = file, os.fstat(file.fileno()).st_size if size is None else size
        self._data, self._at = bytearray(), 4
        self._n_texts = 0
        self.weights_start = 0
        """The start of the weights in the file, once `header` has been read."""
        self._fill(8)
        little = self._data[4] | self._data[5]  # the version; a file of the other byte order has it last
        self.order = "<" if little else ">"
        self._structs = {kind: struct.Struct(self.order + format_) for kind, format_ in _NUMBERS.items()}
        self._n4, self._n8 = self._structs[4], self._structs[10]

    def header(self) -> FileHeader:
        if (version := self._number(self._n4)) not in (2, 3):
            raise ValueError(f"unknown version {version}")
        n_tensors, n_keys = self._number(self._n8), self._number(self._n8)
        if n_tensors > _MOST_TENSORS or n_keys > _MOST_KEYS:
            raise ValueError(
                f"it has {n_tensors} tensors and {n_keys} metadata values; the limits are {_MOST_TENSORS} and "
                f"{_MOST_KEYS}"
            )
        metadata: dict[str, Any] = {}
        types: dict[str, str] = {}
        for _ in range(n_keys):
            key, kind = (
                self._text(65_535),
                self._number(self._n4),
            )  # GGUF's specification limits keys to this many bytes
            if key in metadata:
                raise ValueError(f"it has {key!r:.80} twice")
            metadata[key] = self._value(kind)
            types[key] = VALUE_TYPES[kind]
        tensors = [self._tensor() for _ in range(n_tensors)]
        if len({tensor.name for tensor in tensors}) < n_tensors:
            raise ValueError("two tensors have the same name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r:.80}, which is not a power of 2")
        self.weights_start = -(-self._at // alignment) * alignment
        end = self.weights_start + max((tensor.offset + tensor.n_bytes for tensor in tensors), default=0)
        if tensors and end > self.size:
            raise ValueError(f"it has {self.size} bytes, its weights end at {end}")
        return FileHeader(metadata, tensors, types)

    def before_weights(self) -> bytes:
        if self._data[:4] != b"GGUF":
            raise ValueError(f"it starts with {bytes(self._data[:4])!r}")
        self.header()
        self._fill(self.weights_start)
        return bytes(self._data[: self.weights_start])

    def _tensor(self) -> TensorInfo:
        name, n_dimensions = self._text(_LONGEST_NAME), self._number(self._n4)
        if n_dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {n_dimensions} dimensions")
        shape = tuple(self._number(self._n8) for _ in range(n_dimensions))
        number, offset = self._number(self._n4), self._number(self._n8)
        kind = _NAMES.get(number, f"type {number}")  # newer than `WEIGHT_TYPES`
        tensor = TensorInfo(name, kind, shape, offset)
        if max(tensor.n_elements, *shape, 0) > _MOST_ELEMENTS:
            raise ValueError(f"{name} has the shape {shape}")
        if kind in WEIGHT_TYPES and shape and shape[0] % WEIGHT_TYPES[kind].block:
            raise ValueError(f"the rows of {name} are not whole blocks of {kind}")
        return tensor

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            kind, n = self._number(self._n4), self._number(self._n8)
            return self._skip_texts(n) if kind == _STRING else self._numbers(self._struct(kind), n)
        return self._number(self._struct(kind))

    def _skip_texts(self, n: int) -> int:
        self._n_texts += n
        if self._n_texts > _MOST_TEXTS:
            raise ValueError(f"it has arrays of {self._n_texts} texts; the limit is {_MOST_TEXTS}")
        length, data, at, done = self._n8.unpack_from, self._data, self._at, 0
        while done < n:
            try:
                while done < n:
                    at += 8 + length(data, at)[0]
                    done += 1
            except (struct.error, OverflowError):  # more must be read
                self._fill(at + 8)
        self._at = at
        return n

    def _numbers(self, kind: struct.Struct, n: int) -> tuple[Any, ...] | int:
        """An array of numbers, or its length if that is large."""
        start, end = self._at, self._at + n * kind.size
        self._fill(end)
        self._at = end
        # longer arrays are not kept
        return n if n > 4096 else tuple(value for (value,) in kind.iter_unpack(self._data[start:end]))

    def _text(self, most: int | None = None) -> Any:
        """A text; longer than `most`: an error, without that limit None."""
        n = self._number(self._n8)
        if most is not None and n > most:
            raise ValueError(f"it has a name of {n} bytes")
        start, end = self._at, self._at + n
        self._fill(end)
        self._at = end
        # longer texts are not kept
        return self._data[start:end].decode("utf-8", "replace") if n <= 1 << 20 else None

    def _number(self, kind: struct.Struct) -> Any:
        at = self._at
        self._at += kind.size
        self._fill(self._at)
        return kind.unpack_from(self._data, at)[0]

    def _fill(self, end: int) -> None:
        """Reads the file up to `end`."""
        if end > self.size:
            raise ValueError(f"it has {self.size} bytes, its header ends at {end} or later")
        if end > _MOST_BYTES:
            raise ValueError(f"its header has more than {_MOST_BYTES >> 20} MiB")
        while len(self._data) < end:
            piece = self._file.read(max(1 << 20, end - len(self._data)))
            if not piece:
                raise ValueError(f"it was truncated to {len(self._data)} bytes")
            self._data += piece

    def _struct(self, kind: int) -> struct.Struct:
        if kind not in self._structs:
            raise ValueError(f"it has a value of type {kind}")
        return self._structs[kind]
