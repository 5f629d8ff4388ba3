"""Measures decode steps by batch size and compares them with the memory and compute limits of the device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from cppbatch.bench.prompts import check_can_run, random_prompt
from cppbatch.bench.report import Column, Report, Spread, new_figure
from cppbatch.bench.throughput import bare_loop
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.errors import ConfigError, ModelError
from cppbatch.llama import Backend, Batch
from cppbatch.llama.ggml_graph import DeviceSpeed, measure_device
from cppbatch.models.file_header import TensorInfo, read_header
from cppbatch.models.find import model_parts
from cppbatch.sizing.estimate import estimate_memory
from cppbatch.sizing.machine import this_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NEW_TOKENS, _WARM_UP = 33, 4
_MOST = 4096  # maximum batch size in the search for the border between memory and compute

_COLUMNS = [
    Column("batch_size", "B"),
    Column("mib", "MiB/step"),
    Column("gflop", "GFLOP/step", 2),
    Column("intensity", "FLOP/byte"),
    Column("memory_ms", "memory ms", 3),
    Column("compute_ms", "compute ms", 3),
    Column("bound", "bound by"),
    Column("step_ms", "measured ms", 3),
    Column("of_roof", "% of roof", 0),
    Column("tokens_per_s", "tok/s"),
]


class RooflineSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes to measure. Raises `ConfigError` for sizes out of range."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompt_tokens: int = 64
    """Tokens of each sequence before the measured steps."""
    repeats: int = 3

    def __post_init__(self) -> None:
        for name, flag in (("prompt_tokens", "--prompt-tokens"), ("repeats", "--repeats")):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag} is {getattr(self, name)}; it must be at least 1")


def measure_roofline(
    config: EngineConfig, sizes: RooflineSizes, progress: Callable[[str], object] = lambda line: None
) -> Report:
    """Measures the device, and steps of each batch size. Raises `ConfigError` and the engine's exceptions.

    `config`: all settings except n_ctx and n_parallel, which follow from `sizes`.
    """
    most = max(sizes.batch_sizes)
    n_ctx = most * (sizes.prompt_tokens + _NEW_TOKENS)
    config = msgspec.structs.replace(config, n_ctx=n_ctx, n_parallel=most, prefix_cache=False, spec="off")
    work = _step_work(config)
    device = _device(config)
    progress(f"{device}: reading and multiplying matrices")
    n_threads = config.n_threads or available_threads()
    speed = measure_device(device, work.main_type, n_threads=n_threads)
    runtime = load_runtime(config)
    runtime.context.use_threads(n_threads)  # also if other programs keep cores busy
    try:
        check_can_run(runtime.info, sizes.prompt_tokens, _NEW_TOKENS)
        n_past = sizes.prompt_tokens + _NEW_TOKENS // 2
        rows = []
        for n in sizes.batch_sizes:
            rows.append(roofline_row(work, speed, n, n_past, _step_seconds(runtime, n, sizes)))
            done = f"{len(rows)} of {len(sizes.batch_sizes)}"
            progress(f"{done}: B = {n}: {rows[-1]['step_ms'].text(2)} ms, bound by {rows[-1]['bound']}")
    finally:
        runtime.close()
    return Report(
        kind="roofline",
        title=f"{runtime.info.name} on {device}, {n_past} tokens of each sequence",
        machine=this_machine(),
        model=runtime.info.name,
        settings={
            **msgspec.to_builtins(sizes),
            "device": device,
            "kv_layout": runtime.info.kv_layout,
            "bytes_per_s": speed.bytes_per_s,
            "flops": speed.flops,
            "step_work": msgspec.to_builtins(work),
            "n_threads": n_threads,
        },
        columns=_COLUMNS,
        rows=rows,
        notes=[
            f"{device} reads {speed.bytes_per_s / 1e9:,.1f} GB/s and computes {speed.flops / 1e9:,.0f} GFLOP/s with "
            f"{work.main_type} matrices, both measured with llama.cpp's kernels.",
            _border(work, speed, n_past),
            "memory ms, compute ms: the step's bytes and operations at these speeds; the longer one is the roof.",
        ],
    )


def roofline_row(
    work: StepWork, speed: DeviceSpeed, batch_size: int, n_past: int, seconds: list[float]
) -> dict[str, Any]:
    """The row of a batch size. `seconds`: measured times of its steps."""
    n_bytes, flops = work.n_bytes(batch_size, n_past), work.flops(batch_size, n_past)
    memory, compute = n_bytes / speed.bytes_per_s, flops / speed.flops
    return {
        "batch_size": batch_size,
        "mib": n_bytes / 2**20,
        "gflop": flops / 1e9,
        "intensity": flops / n_bytes,
        "memory_ms": 1000 * memory,
        "compute_ms": 1000 * compute,
        "bound": "compute" if compute > memory else "memory",
        "step_ms": Spread.of(1000 * each for each in seconds),
        "of_roof": Spread.of(100 * max(memory, compute) / each for each in seconds),
        "tokens_per_s": Spread.of(batch_size / each for each in seconds),
        "flops": Spread.of(flops / each for each in seconds),
    }


def border(work: StepWork, speed: DeviceSpeed, n_past: int) -> int | None:
    """The smallest batch size that is bound by compute; None if even thousands of sequences are bound by memory."""
    sizes = range(1, _MOST + 1)
    longer = (n for n in sizes if work.flops(n, n_past) / speed.flops > work.n_bytes(n, n_past) / speed.bytes_per_s)
    return next(longer, None)


def _border(work: StepWork, speed: DeviceSpeed, n_past: int) -> str:
    first = border(work, speed, n_past)
    if first is None:
        return f"Up to B = {_MOST} a step is bound by memory."
    if first == 1:
        return "Every step is bound by compute: more parallel sequences only gain as much as larger matrix products do."
    return f"Below B = {first} a step is bound by memory, and more sequences cost little; from there on by compute."


def _step_work(config: EngineConfig) -> StepWork:
    (footprint,) = estimate_memory([config]).footprints
    if footprint.error:
        raise ModelError(footprint.error)
    if 0 < config.n_gpu_layers < footprint.n_layers:
        raise ConfigError(
            f"-ngl {config.n_gpu_layers} splits the {footprint.n_layers} layers between GPU and CPU, but a roofline "
            "covers a single device: use -ngl -1 or -ngl 0"
        )
    cells, states = (sum(b.n_bytes for b in footprint.buffers if b.kind == kind) for kind in ("cells", "states"))
    per_token, per_sequence = cells / config.n_ctx, states / config.n_parallel
    return read_step_work(Path(config.model_path), kv_bytes=per_token, state_bytes=per_sequence)


def _device(config: EngineConfig) -> str:
    """ggml's name of the device that computes the layers."""
    gpus = [device.name for device in Backend.get().devices() if "GPU" in device.kind]
    return gpus[config.device or 0] if gpus and config.n_gpu_layers else "CPU"


def _step_seconds(runtime: Runtime, n: int, sizes: RooflineSizes) -> list[float]:
    batch = Batch(runtime.context.n_batch)
    draw = np.random.default_rng(n)
    prompts = [random_prompt(draw, sizes.prompt_tokens, runtime.info.n_vocab) for _ in range(n)]
    bare_loop(runtime.context, batch, prompts, _WARM_UP)
    return [n / bare_loop(runtime.context, batch, prompts, _NEW_TOKENS).decode for _ in range(sizes.repeats)]


# --- step work -------------------------------------------------------------------------------------------------------
# The bytes and floating-point operations of a decode step, from the header of the model file.


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
        dense_bytes=sum(map(_n_bytes, dense)),
        dense_weights=_in_matrices(dense),
        expert_bytes=sum(map(_n_bytes, experts)),
        expert_weights=_in_matrices(experts),
        experts_used=(value("expert_used_count") or 0) / n_experts if n_experts else 0.0,
        kv_bytes=kv_bytes,
        state_bytes=state_bytes,
        attention_flops=_attention_flops(value),
        main_type=types.most_common(1)[0][0],
    )


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


# --- roofline plot ---------------------------------------------------------------------------------------------------
# The plot of `cppbatch bench roofline`: operations per second over operations per byte.


def plot_roofline(report: Report) -> Figure:
    """Plots the roof given by memory and compute, and the measured steps below it, on logarithmic axes."""
    figure, (axes,) = new_figure(report)
    bandwidth, peak = report.settings["bytes_per_s"], report.settings["flops"]
    intensities = [row["intensity"] for row in report.rows]
    ridge = peak / bandwidth
    x = np.geomspace(min(*intensities, ridge) / 2, max(*intensities, ridge) * 2, 100)
    axes.plot(x, np.minimum(bandwidth * x, peak) / 1e9, color="black", label="roof: memory, then compute")
    axes.axvline(ridge, color="tab:red", linestyle="--", label=f"ridge: {ridge:.1f} FLOP/byte")
    axes.plot(intensities, [row["flops"].median / 1e9 for row in report.rows], "o-", label="measured steps")
    for row, intensity in zip(report.rows, intensities, strict=True):
        axes.annotate(
            f"B={row['batch_size']}",
            (intensity, row["flops"].median / 1e9),
            (5, -9),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte (FLOP/byte)")
    axes.set_ylabel("GFLOP/s")
    axes.legend(fontsize=8)
    return figure
