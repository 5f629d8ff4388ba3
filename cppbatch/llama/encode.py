"""ggml's own conversion of floats to its types of weights: all of them, many more than the gguf package has."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES

from cppbatch.llama.library import ggml


def encode(rows: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Converts rows, float32[n, columns], to blocks of `kind`, uint8[n, bytes of a row].

    `columns` must be a multiple of the type's block size. `kind` must be a type of weights that needs no importance
    matrix: for others, ggml aborts the process.
    """
    lib = ggml()
    convert = lib.ggml_quantize_chunk
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    convert.argtypes, convert.restype = [ctypes.c_int, pointer, pointer, *[number] * 3, pointer], ctypes.c_size_t
    n, columns = rows.shape
    block, n_bytes = GGML_QUANT_SIZES[kind]
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty((n, columns // block * n_bytes), np.uint8)
    convert(int(kind), rows.ctypes.data, out.ctypes.data, 0, n, columns, None)
    return out
