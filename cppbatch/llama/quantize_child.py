"""The child process that rewrites a model: llama.cpp's quantiser cannot be interrupted, and may abort."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from gguf import GGMLQuantizationType, LlamaFileType

from cppbatch.config import available_threads
from cppbatch.errors import CppBatchError, ModelError
from cppbatch.llama.backend import Backend
from cppbatch.llama.library import C
from cppbatch.models.check import check_model
from cppbatch.models.requantize import FLOATS, Job


def main() -> None:
    """Reads a `Job` from stdin. Exit code 1 with one line on stderr if it fails."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        quantize(Path(job.source), Path(job.target), job.default, job.overrides)
    except CppBatchError as error:
        sys.exit(str(error))


def quantize(source: Path, target: Path, default: str, overrides: Mapping[str, str] | None = None) -> Path:
    """Writes the model `source` to `target`, with all matrices of type `default`, and returns `target`.

    `default`: a type of ggml or a file type of llama.cpp ("Q8_0", "Q4_K_S"). `overrides`: {tensor: type}, for tensors
    with a different type. A tensor that already has its type is copied byte for byte, like vectors and the small
    matrices that llama.cpp never quantises. A matrix with rows that are not a multiple of a type's block gets
    llama.cpp's replacement for that type. The call cannot be interrupted, and a damaged file may abort the process.
    Raises `ModelError` with llama.cpp's reason, ValueError for an unknown type.
    """
    overrides = overrides or {}
    if overrides and default in FLOATS:
        raise ValueError(f"llama.cpp supports overrides only with a quantised default type, not {default}")
    listed = (C.llama_model_tensor_override * (len(overrides) + 1))()  # the last one is empty and ends the list
    for entry, (name, kind) in zip(listed, overrides.items(), strict=False):
        entry.pattern, entry.type = f"^{re.escape(name)}$".encode(), GGMLQuantizationType[kind].value
    no_imatrix = (C.llama_model_imatrix_data * 1)()  # with a null pointer, llama.cpp refuses to copy 1 to 3 bit tensors
    params = C.llama_model_quantize_default_params()
    params.ftype = _file_type(default)
    params.nthread = available_threads()
    params.allow_requantize = params.pure = True
    params.tt_overrides = ctypes.cast(listed, type(params.tt_overrides))
    params.imatrix = ctypes.cast(no_imatrix, type(params.imatrix))
    check_model(source)
    with Backend.get().errors() as lines:
        code = C.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code != 0:
        raise ModelError(f"{source} cannot be written as {default}: {lines[-1] if lines else f'code {code}'}")
    return target


def _file_type(kind: str) -> int:
    """The `general.file_type` of a model whose matrices are of this type. Raises ValueError for an unknown type."""
    for name in (f"MOSTLY_{kind}", f"MOSTLY_{kind}_M", f"ALL_{kind}", f"MOSTLY_{kind}_MOE"):
        if name in LlamaFileType.__members__:
            return int(LlamaFileType[name])
    raise ValueError(f"llama.cpp has no file type {kind}")


if __name__ == "__main__":
    main()
