"""LoRA adapters with random weights, for the models of `write_llama`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import gguf

from cppbatch.models.synthetic import LlamaShape, Weight, write_gguf

TARGETS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""The matrices of a Llama layer that an adapter changes."""


def write_lora(
    path: str | os.PathLike[str],
    shape: LlamaShape | None = None,
    *,
    rank: int = 4,
    gain: float = 1.0,
    seed: int = 0,
    targets: Sequence[str] = TARGETS,
    arch: str = "llama",
) -> Path:
    """Writes a random LoRA adapter for a Llama model of this shape to `path` and returns it.

    At scale 1, the matrix that it adds to each of the `targets` multiplies the norm of its input by about `gain`.
    """
    shape = shape or LlamaShape()
    n_kv = shape.n_embd // shape.n_head * shape.n_head_kv
    outputs = {"attn_k": n_kv, "attn_v": n_kv, "ffn_gate": shape.n_ff, "ffn_up": shape.n_ff}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", rank)  # llama.cpp multiplies by scale * alpha / rank
    weights = []
    for i in range(shape.n_layer):
        for target in targets:
            name, n_in = f"blk.{i}.{target}.weight", shape.n_ff if target == "ffn_down" else shape.n_embd
            weights.append(Weight(f"{name}.lora_a", (rank, n_in), std=1 / math.sqrt(n_in)))
            weights.append(
                Weight(f"{name}.lora_b", (outputs.get(target, shape.n_embd), rank), std=gain / math.sqrt(rank))
            )
    return write_gguf(path, writer, weights, seed=seed)
