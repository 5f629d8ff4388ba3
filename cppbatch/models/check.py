"""Checks of a GGUF file before llama.cpp reads it, which aborts the process or computes nonsense for some."""

from __future__ import annotations

import math
import re
from pathlib import Path

from cppbatch.config import MAX_LAYERS
from cppbatch.errors import ModelError
from cppbatch.models.file_header import TensorInfo, read_header
from cppbatch.models.find import model_parts

_MAX_CONTEXT = 1 << 30  # tokens; positions are int32
_MULTIPLIED = re.compile(
    r"(token_embd|output|blk\.\d+\.(attn_\w+|ffn_(gate|up|down)(_exps|_shexp)?|ssm_\w+))\.(weight|bias)"
)
NO_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
"""Types that llama.cpp cannot multiply matrices of. Some tables have them."""


def check_model(path: Path) -> Path:
    """Returns `path`. Raises `ModelError` for a model file, or another part of it, with which llama.cpp aborts the
    process, computes nonsense, or takes minutes to read the header; and as `read_header`. Takes milliseconds."""
    for part in model_parts(path):
        header = read_header(part)
        _check_numbers(part, header.metadata)
        check_types(part, header.tensors)
    return path


def _check_numbers(path: Path, metadata: dict[str, object]) -> None:
    prefix = f"{metadata.get('general.architecture')}."
    for key, value in metadata.items():
        if not key.startswith(prefix) or not isinstance(value, (int, float)):
            continue
        name = key[len(prefix) :]
        if name == "block_count" and not 1 <= value <= MAX_LAYERS:
            wanted = f"it must be from 1 to {MAX_LAYERS} layers"
        elif name == "context_length" and not 1 <= value <= _MAX_CONTEXT:
            wanted = f"it must be from 1 to {_MAX_CONTEXT} tokens"
        elif name.endswith("_epsilon") and not 0 <= value < math.inf:
            wanted = "it must be 0 or more"
        elif name.endswith("rope.freq_base") and not 0 < value < math.inf:
            wanted = "it must be above 0"
        else:
            continue
        raise ModelError(f"{path} is damaged: {key} is {value}; {wanted}. Download it again")


def check_types(path: Path, tensors: list[TensorInfo]) -> None:
    """Raises `ModelError` for weights of a type of which llama.cpp has no products."""
    for tensor in tensors:
        if tensor.kind in NO_WEIGHTS and _MULTIPLIED.fullmatch(tensor.name):
            raise ModelError(
                f"{path} is damaged: {tensor.name} is of type {tensor.kind}; it must be a float or quantised type. "
                "Download it again"
            )
