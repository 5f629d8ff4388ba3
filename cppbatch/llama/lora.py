"""LoRA adapters: small matrices added to a model's own, each with a scale."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

from cppbatch.config import setting_name
from cppbatch.errors import ModelError
from cppbatch.llama.backend import Backend
from cppbatch.llama.library import C
from cppbatch.models.check import NO_WEIGHTS
from cppbatch.models.file_header import FileHeader, read_header
from cppbatch.models.find import model_parts

_EMBEDDING = "token_embd.weight"


def load_adapter(path: Path, model_handle: Any, model_path: Path, n_experts: int) -> Any:
    """Loads an adapter for a model and returns llama.cpp's pointer, which is freed with the model.

    `n_experts`: experts per layer of the model, 0 if it has none. Raises `ModelError`, with llama.cpp's reason if it
    logs one, for a file that is missing or not an adapter, for an adapter of another architecture or base model, and
    for aLoRA adapters.
    """
    if not path.is_file():
        raise ModelError(f"{setting_name('lora')}: adapter file not found: {path}; give the path of a GGUF adapter")
    check_adapter(path, model_path, n_experts)
    with Backend.get().errors() as lines:
        handle = C.llama_adapter_lora_init(model_handle, os.fsencode(path))
    if not handle:
        reason = lines[-1].split("failed to apply lora adapter: ")[-1] if lines else "llama.cpp gave no reason"
        error = ModelError(f"{path} cannot be used as an adapter for {model_path.name}: {reason}")
        raise Backend.get().failure(error, lines)
    if C.llama_adapter_get_alora_n_invocation_tokens(handle):
        C.llama_adapter_lora_free(handle)
        raise ModelError(
            f"{path} is an aLoRA adapter, which applies only after its invocation tokens; this is not supported"
        )
    return handle


def check_adapter(path: Path, model_path: Path, n_experts: int) -> None:
    """Raises `ModelError` for an adapter file that would abort the process while it is loaded or used.

    llama.cpp makes the other checks. `n_experts`: experts per layer of the model; 0: none.
    """
    header = read_header(path)
    _check_metadata(path, header)
    shapes = {tensor.name: list(tensor.shape) for tensor in header.tensors}
    for name, kind, _, _ in header.tensors:
        shape = shapes[name]
        if not name.endswith((".lora_a", ".lora_b")):
            continue
        if kind in NO_WEIGHTS:
            raise ModelError(f"{path}: {name} is of type {kind}; it must be a float or quantised type")
        n_experts_here = shape.pop() if "_exps." in name and len(shape) == 3 else 0
        if len(shape) != 2 or min(shape) < 1 or n_experts_here not in (0, n_experts):
            raise ModelError(f"{path}: {name} has the shape {shape}, which does not fit any matrix of this model")
    if (a := shapes.get(f"{_EMBEDDING}.lora_a")) and (b := shapes.get(f"{_EMBEDDING}.lora_b")):
        if a[0] != b[0]:
            raise ModelError(
                f"{path}: the ranks of {_EMBEDDING}.lora_a and lora_b are {a[0]} and {b[0]}; they must be equal"
            )
        if not any(
            tensor.name == "output.weight" for part in model_parts(model_path) for tensor in read_header(part).tensors
        ):
            raise ModelError(
                f"{path} changes {_EMBEDDING}, which this model also uses as its output matrix; llama.cpp does not "
                "support this. Train an adapter without it"
            )


def _check_metadata(path: Path, header: FileHeader) -> None:
    """Checks the types of the metadata that llama.cpp reads without checking them."""
    for key, wanted in {
        "general.type": "STRING",
        "general.architecture": "STRING",
        "adapter.type": "STRING",
        "adapter.lora.alpha": "FLOAT32",
    }.items():
        kind = header.value_types.get(key, wanted)
        if kind != wanted:
            raise ModelError(f"{path}: {key} is of type {kind}; it must be {wanted}")
        if kind == "FLOAT32" and not math.isfinite(alpha := header.metadata.get(key, 0.0)):
            raise ModelError(f"{path}: {key} is {alpha}; it must be a finite number")


def adapter_arguments(handles: list[Any], scales: list[float]) -> tuple[Any, int, Any]:
    """The arguments of `llama_set_adapters_lora` after the context."""
    n = len(handles)
    if n == 0:
        return None, 0, None
    return (C.llama_adapter_lora_p_ctypes * n)(*handles), n, (ctypes.c_float * n)(*scales)
