"""The bytes and floating-point operations of a decode step, from the header of the model file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from cppbatch.errors import ModelError
from cppbatch.models.file_header import TensorInfo, read_header
from cppbatch.models.find import model_parts

_EXPERTS = re.compile(r"\.ffn_\w+_exps\.")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a model's decode steps."""

    dense_bytes: float
    """Weights that every step reads once, independent of its batch size."""
    dense_weights: float
    """Elements of their matrices; each is multiplied and added once per row."""
    expert_bytes: float
    """The weights of all experts (MoE); a step reads those used by any of its rows."""
    expert_weights: float
    experts_used: float
    """The fraction of experts that a row uses."""
    kv_bytes: float
    """The size of a token's keys and values, in all layers."""
    state_bytes: float
    """The size of a sequence's recurrent state, which a step reads and writes."""
    attention_flops: float
    """Operations of a row per token that it attends to."""
    main_type: str
    """The type of most weights, by ggml's name."""

    def n_bytes(self, batch_size: int, n_past: int) -> float:
        """Bytes that a step of `batch_size` sequences with `n_past` tokens each moves: weights, keys, values, states.

        Assumes that experts are chosen at random, so a larger batch uses more of them.
        """
        experts = 1 - (1 - self.experts_used) ** batch_size
        of_sequence = n_past * self.kv_bytes + 2 * self.state_bytes
        return self.dense_bytes + experts * self.expert_bytes + batch_size * of_sequence

    def flops(self, batch_size: int, n_past: int) -> float:
        """Operations of such a step; a multiplication and an addition count as two."""
        weights = self.dense_weights + self.experts_used * self.expert_weights
        return batch_size * (2 * weights + n_past * self.attention_flops)


def read_step_work(path: Path, *, kv_bytes: float, state_bytes: float = 0.0) -> StepWork:
    """Reads the header of a model file, and of its other parts. `kv_bytes`: per token. `state_bytes`: per sequence.

    Raises `ModelError` if a file is not GGUF, or if its weight types are unknown.
    """
    headers = [read_header(part) for part in model_parts(path)]
    metadata = headers[0].metadata
    tensors = [tensor for header in headers for tensor in header.tensors]
    names = {tensor.name for tensor in tensors}
    # Without an output matrix, the embedding matrix replaces it. Otherwise a step reads one of its rows per sequence.
    loaded = [tensor for tensor in tensors if tensor.name != _EMBEDDING or _OUTPUT not in names]
    experts = [tensor for tensor in loaded if _EXPERTS.search(tensor.name)]
    dense = [tensor for tensor in loaded if not _EXPERTS.search(tensor.name)]
    value = _architecture_values(metadata)
    n_experts = value("expert_count") or 0
    types = Counter[str]()
    for tensor in loaded:
        types[tensor.kind] += tensor.n_elements
    return StepWork(
        dense_bytes=sum(map(_n_bytes, dense)), dense_weights=_in_matrices(dense),
        expert_bytes=sum(map(_n_bytes, experts)), expert_weights=_in_matrices(experts),
        experts_used=(value("expert_used_count") or 0) / n_experts if n_experts else 0.0, kv_bytes=kv_bytes,
        state_bytes=state_bytes, attention_flops=_attention_flops(value), main_type=types.most_common(1)[0][0],
    )  # fmt: skip


def _architecture_values(metadata: dict[str, Any]) -> Callable[[str], Any]:
    architecture = metadata.get("general.architecture", "")
    return lambda name: metadata.get(f"{architecture}.{name}")


def _attention_flops(value: Callable[[str], Any]) -> float:
    """Operations of one row per token of its context: a product with the key and one with the value, in every head."""
    n_layers, heads = value("block_count") or 0, value("attention.head_count") or 0
    n_heads = sum(heads) if isinstance(heads, tuple) else n_layers * heads
    most = max(heads) if isinstance(heads, tuple) else heads
    size = (value("embedding_length") or 0) / most if most else 0.0
    lengths = (value("attention.key_length") or size, value("attention.value_length") or size)
    return float(2 * n_heads * sum(lengths))


def _n_bytes(tensor: TensorInfo) -> float:
    if tensor.kind not in GGMLQuantizationType.__members__:
        raise ModelError(
            f"{tensor.name} is of type {tensor.kind}, which the installed gguf package does not support; update it"
        )
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    return tensor.n_elements / float(block) * float(size)


def _in_matrices(tensors: list[TensorInfo]) -> float:
    return sum(tensor.n_elements for tensor in tensors if len(tensor.shape) > 1)
