"""What a LoRA file must be like before llama.cpp sees it: what it does not check itself trips assertions there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from cppbatch.errors import ModelError

_EMBEDDING = "token_embd.weight"
_NO_FACTORS = ("I8", "I16", "I32", "I64", "F64")  # types that llama.cpp cannot multiply by


def check_adapter(path: Path, model_path: Path, n_experts: int) -> None:
    """Raises `ModelError` for a file that would abort the process, now or when it is used. llama.cpp does the rest.

    `n_experts`: of the model's layers, 0 where it has none.
    """
    reader = _read(path)
    _check_metadata(path, reader)
    shapes: dict[str, list[int]] = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
    for tensor in reader.tensors:
        name, shape = tensor.name, shapes[tensor.name]
        if not name.endswith((".lora_a", ".lora_b")):
            continue
        if tensor.tensor_type.name in _NO_FACTORS:
            raise ModelError(f"{path}: {name} is of type {tensor.tensor_type.name}; it must be of floats or quantised")
        n_experts_here = shape.pop() if "_exps." in name and len(shape) == 3 else 0
        if len(shape) != 2 or min(shape) < 1 or n_experts_here not in (0, n_experts):
            raise ModelError(f"{path}: {name} has the shape {shape}, which fits no matrix of this model")
    if (a := shapes.get(f"{_EMBEDDING}.lora_a")) and (b := shapes.get(f"{_EMBEDDING}.lora_b")):
        if a[0] != b[0]:
            raise ModelError(f"{path}: the ranks of {_EMBEDDING}.lora_a and lora_b are {a[0]} and {b[0]}; one is wrong")
        if not any(tensor.name == "output.weight" for tensor in _read(model_path).tensors):
            raise ModelError(
                f"{path} changes {_EMBEDDING}, which this model uses for its output too, and llama.cpp cannot compute "
                "that. Train an adapter without it"
            )


def _read(path: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:  # what it raises for cut-off or damaged files
        raise ModelError(f"{path} is no GGUF file, or damaged, or cut off: {error}") from error


def _check_metadata(path: Path, reader: Any) -> None:
    """llama.cpp takes the types of these for granted."""
    for key, kind in {
        "general.type": "STRING",
        "general.architecture": "STRING",
        "adapter.type": "STRING",
        "adapter.lora.alpha": "FLOAT32",
    }.items():
        field = reader.get_field(key)
        if field is None:
            continue
        if field.types[0].name != kind:
            raise ModelError(f"{path}: {key} is of type {field.types[0].name}; it must be {kind}")
        if kind == "FLOAT32" and not math.isfinite(field.contents()):
            raise ModelError(f"{path}: {key} is {field.contents()}; it must be a finite number")
