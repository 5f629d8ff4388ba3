"""ggml's own conversion of floats to its types of weights: all of them, many more than the gguf package has."""

from __future__ import annotations

import ctypes
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES

from cppbatch.llama.library import ggml


def encode(rows: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Converts rows, float32[n, columns], to blocks of `kind`, uint8[n, bytes of a row].

    Where a type needs an importance matrix, all columns are equally important. `columns` must be a multiple of the
    type's block size. Raises ValueError for a type that no weights have.
    """
    lib = ggml()
    convert = lib.ggml_quantize_chunk
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    convert.argtypes, convert.restype = [ctypes.c_int, pointer, pointer, *[number] * 3, pointer], ctypes.c_size_t
    n, columns = rows.shape
    block, n_bytes = GGML_QUANT_SIZES[kind]
    rows, importance = np.ascontiguousarray(rows, np.float32), np.ones(columns, np.float32)
    out = np.empty((n, columns // block * n_bytes), np.uint8)
    convert(int(kind), *_addresses(rows, out), 0, n, columns, importance.ctypes.data)
    return out


def _addresses(*arrays: npt.NDArray[Any]) -> list[int]:
    return [array.ctypes.data for array in arrays]
