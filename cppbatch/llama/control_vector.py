"""Control vectors: directions that are added to the outputs of a model's layers."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.config import setting_name
from cppbatch.errors import LlamaError, ModelError
from cppbatch.llama.library import C
from cppbatch.models.file_header import read_floats, read_header

_DIRECTION = re.compile(r"direction\.([1-9]\d*)")  # llama.cpp refuses layer 0, which has no output to change

Directions = npt.NDArray[np.float32]
"""A control vector, or a sum of some: [layer - 1, n_embd]."""


def apply_directions(context: Any, directions: Directions | None, layers: tuple[int, ...]) -> None:
    """Adds them in all later computations of a context, llama.cpp's pointer; None: nothing more.

    `layers`: the first and the last that they apply to; (): all. llama.cpp plans its graph again in the next decode.
    Raises `LlamaError`.
    """
    if directions is None:
        C.llama_set_adapter_cvec(context, None, 0, 0, -1, -1)
        return
    data, (n_layers, n_embd) = directions.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), directions.shape
    first, last = layers or (1, n_layers + 1)
    C.llama_synchronize(context)  # a device may still read the old ones
    if C.llama_set_adapter_cvec(context, data, directions.size, n_embd, first, last):
        raise LlamaError(f"{setting_name('control_vectors')}: llama.cpp cannot allocate them")


def read_control_vector(path: Path, *, n_embd: int, n_layers: int) -> Directions:
    """Reads a file. Directions of layers that the model does not have are ignored, as in llama.cpp.

    Raises `ModelError` for a file that is missing, not a control vector, or for a model of another size.
    """
    if not path.is_file():
        raise ModelError(f"{setting_name('control_vectors')}: file not found: {path}")
    directions = np.zeros((max(1, n_layers - 1), n_embd), np.float32)
    for tensor in read_header(path).tensors:
        layer = _DIRECTION.fullmatch(tensor.name)
        if not layer or tensor.kind != "F32" or len(tensor.shape) != 1:
            raise ModelError(
                f"{path} has the tensor {tensor.name} of type {tensor.kind}; a control vector has vectors of type "
                "F32 named direction.1, direction.2 ..."
            )
        if tensor.shape[0] != n_embd:
            raise ModelError(
                f"{path} is for a model whose vectors have {tensor.shape[0]} dimensions; those of this model have "
                f"{n_embd}"
            )
        if (i := int(layer[1]) - 1) < len(directions):
            directions[i] += read_floats(path, tensor.name)
    return directions
