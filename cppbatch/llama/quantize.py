"""Rewriting a model's weights in another type."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Literal

from cppbatch.errors import ModelError
from cppbatch.llama.backend import Backend
from cppbatch.llama.library import C

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}


def requantize(source: Path, target: Path, kind: Literal["F32", "F16", "Q4_0", "Q4_1", "Q8_0"]) -> Path:
    """Writes `source`'s weights as `kind` to `target` and returns it. Raises `ModelError`."""
    params = C.llama_model_quantize_default_params()
    params.ftype = _FILE_TYPES[kind]
    params.allow_requantize = True
    with Backend.get().errors() as lines:
        code = C.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code != 0:
        raise ModelError(f"{source} cannot be rewritten as {kind}: {lines[0] if lines else f'code {code}'}")
    return target
