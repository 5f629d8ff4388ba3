"""Calculates how models that people run are placed on cards of several sizes: the table of docs/gpu.md.

    .venv/bin/python scripts/placement_table.py

Nothing is measured: the models are files without weights, of the sizes of real ones in Q4_0, and the card is an RPC
worker of this machine that reports another size. The speeds of the card and the CPU are `CARD` and `CPU_TIMES`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import gguf
import msgspec

from cppbatch.config import EngineConfig
from cppbatch.models.kernels import DeviceTimes
from cppbatch.models.synthetic import Weight, add_vocab, byte_vocab, write_gguf
from cppbatch.sizing import placement, sizes
from cppbatch.sizing.device_times import CPU
from cppbatch.sizing.estimate import Device, MemoryEstimate, estimate_memory
from cppbatch.sizing.memory_check import first_ample
from cppbatch.sizing.sizes import size_candidates

GIB = 2**30
CARD = DeviceTimes({"Q4_0": {1: 0.0015, 16: 0.002, 512: 0.03}}, 0.03, 0.05)
"""400 GB/s, and copies from the host's memory at 20 GB/s."""
CPU_TIMES = DeviceTimes({"Q4_0": {1: 0.0095, 16: 0.065, 512: 2.0}}, 0.0, 0.0)
"""60 GB/s, 500 GFLOP/s: eight cores with two channels of DDR5."""
HOST = 64 * GIB
DESKTOP = 0.6 * GIB
"""Of the card, used by the desktop."""


class Shape(NamedTuple):
    """The sizes of a model."""

    layers: int
    embd: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocab: int
    experts: int = 0
    used: int = 0


MODELS = {
    "Llama 3.1 8B": Shape(32, 4096, 32, 8, 128, 14336, 128_256),
    "Qwen 3 14B": Shape(40, 5120, 40, 8, 128, 17408, 151_936),
    "gpt-oss 20B": Shape(24, 2880, 64, 8, 64, 2880, 201_088, 32, 4),
    "Qwen 3 30B-A3B": Shape(48, 2048, 32, 4, 128, 768, 151_936, 128, 8),
    "Qwen 3 32B": Shape(64, 5120, 64, 8, 128, 25600, 151_936),
    "Llama 3.3 70B": Shape(80, 8192, 64, 8, 128, 28672, 128_256),
    "GLM 4.5 Air": Shape(46, 4096, 96, 8, 128, 1408, 151_552, 128, 8),
    "gpt-oss 120B": Shape(36, 2880, 64, 8, 64, 2880, 201_088, 128, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Placements of models on cards, calculated, as a table in Markdown.")
    parser.add_argument("--cards", default="8,12,16,24", help="Sizes of the card in GiB.")
    parser.add_argument("--only", default="", help="Only models with this in their names.")
    arguments = parser.parse_args()
    cards = [int(each) for each in arguments.cards.split(",")]
    print(f"| model | weights | {' | '.join(f'{card} GiB' for card in cards)} |\n|---|{'---|' * (len(cards) + 1)}")
    command = [sys.executable, "-m", "cppbatch", "rpc-worker", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker,
    ):
        try:
            assert worker.stdout
            endpoint = next(word for line in worker.stdout for word in line.split() if word.startswith("127.0.0.1:"))
            for name, shape in MODELS.items():
                if arguments.only in name:
                    path = write(Path(folder) / "model.gguf", shape)
                    cells = [cell(path, endpoint.rstrip(",.:;"), shape, card * GIB) for card in cards]
                    print(f"| {name} | {path.stat().st_size / GIB:.1f} GiB | {' | '.join(cells)} |", flush=True)
        finally:
            worker.terminate()


def write(path: Path, shape: Shape) -> Path:
    """A model of this shape without weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.embd)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
    add_vocab(writer, byte_vocab(shape.vocab))
    n, n_q, n_kv = shape.embd, shape.heads * shape.head, shape.kv_heads * shape.head
    weights = [Weight("token_embd.weight", (shape.vocab, n)), Weight("output.weight", (shape.vocab, n))]
    weights.append(Weight("output_norm.weight", (n,)))
    sides: dict[str, tuple[int, ...]] = {"gate": (shape.ff, n), "up": (shape.ff, n), "down": (n, shape.ff)}
    for i in range(shape.layers):
        tensors: dict[str, tuple[int, ...]] = {
            "attn_norm": (n,), "attn_q": (n_q, n), "attn_k": (n_kv, n), "attn_v": (n_kv, n), "attn_output": (n, n_q),
            "ffn_norm": (n,),
        }  # fmt: skip
        if shape.experts:
            tensors["ffn_gate_inp"] = (shape.experts, n)
            tensors |= {f"ffn_{side}_exps": (shape.experts, *size) for side, size in sides.items()}
        else:
            tensors |= {f"ffn_{side}": size for side, size in sides.items()}
        weights += [Weight(f"blk.{i}.{name}.weight", size) for name, size in tensors.items()]
    return write_gguf(path, writer, weights, quant="Q4_0", is_hollow=True)


def cell(path: Path, endpoint: str, shape: Shape, card: int) -> str:
    """What such a card gets, and the speeds to expect."""

    def estimate(configs: list[EngineConfig]) -> MemoryEstimate:
        found = estimate_memory(configs)
        free = int(card - DESKTOP)
        devices = [msgspec.structs.replace(each, description="card", free=free, total=card) for each in found.devices]
        return MemoryEstimate(found.footprints, devices)

    def times(_: EngineConfig, devices: Sequence[Device], *_more: object, **_named: object) -> dict[str, DeviceTimes]:
        return {CPU: CPU_TIMES, devices[0].name: CARD}

    config = EngineConfig(str(path), rpc=(endpoint,))
    with ExitStack() as patched:
        for module in (sizes, placement):
            patched.enter_context(mock.patch.object(module, "estimate_memory", estimate))
            patched.enter_context(mock.patch.object(module, "free_host_memory", return_value=HOST))
        patched.enter_context(mock.patch.object(placement, "device_times", times))
        planned = first_ample(size_candidates(config, set(), n_ctx_train=32_768, on_gpu=True))
    chosen, speeds = planned.config, planned.speeds
    size = f"`-np {chosen.n_parallel} -c {chosen.n_ctx}`"
    if not speeds:
        return f"all, {size}"
    layers, part = shape.layers, "experts" if shape.experts else "feed-forward"
    whole = layers + 1 - chosen.n_gpu_layers if chosen.n_gpu_layers >= 0 else 0
    ffn = (chosen.n_cpu_moe or chosen.n_cpu_ffn) - whole
    if whole > layers:
        held = "the CPU computes all"
    else:
        parts = [f"{whole} layers"] * (whole > 0) + [f"{part} of {ffn} layers"] * (ffn > 0)
        held = f"{' and '.join(parts)} of {layers} on the CPU"
    return f"{held}, {size}: {speeds.alone:.0f} alone, {speeds.full:.0f} together, prompts {speeds.prompt:.0f}"


if __name__ == "__main__":
    main()
