"""Measures decode steps by batch size and compares them with the memory and compute limits of the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cppbatch.bench.prompts import check_can_run, check_least, random_prompt
from cppbatch.bench.report import Column, Report, Spread, new_figure
from cppbatch.bench.step_work import StepWork, read_step_work
from cppbatch.bench.throughput import bare_loop
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.errors import ConfigError, ModelError
from cppbatch.llama import Backend, Batch
from cppbatch.llama.device_speed import DeviceSpeed, measure_device
from cppbatch.sizing.estimate import estimate_memory
from cppbatch.sizing.machine import this_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NEW_TOKENS, _WARM_UP = 33, 4
_MOST = 4096  # maximum batch size in the search for the border between memory and compute

_COLUMNS = [
    Column("batch_size", "B"), Column("mib", "MiB/step"), Column("gflop", "GFLOP/step", 2),
    Column("intensity", "FLOP/byte"), Column("memory_ms", "memory ms", 3), Column("compute_ms", "compute ms", 3),
    Column("bound", "bound by"), Column("step_ms", "measured ms", 3), Column("of_roof", "% of roof", 0),
    Column("tokens_per_s", "tok/s"),
]  # fmt: skip


class RooflineSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes to measure. Raises `ConfigError` for sizes out of range."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompt_tokens: int = 64
    """Tokens of each sequence before the measured steps."""
    repeats: int = 3

    def __post_init__(self) -> None:
        check_least({"--prompt-tokens": self.prompt_tokens, "--repeats": self.repeats})


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
        kind="roofline", title=f"{runtime.info.name} on {device}, {n_past} tokens of each sequence",
        machine=this_machine(), model=runtime.info.name,
        settings={
            **msgspec.to_builtins(sizes),
            "device": device,
            "kv_layout": runtime.info.kv_layout,
            "bytes_per_s": speed.bytes_per_s,
            "flops": speed.flops,
            "step_work": msgspec.to_builtins(work),
            "n_threads": n_threads,
        },
        columns=_COLUMNS, rows=rows,
        notes=[
            f"{device} reads {speed.bytes_per_s / 1e9:,.1f} GB/s and computes {speed.flops / 1e9:,.0f} GFLOP/s with "
            f"{work.main_type} matrices, both measured with llama.cpp's kernels.",
            _border(work, speed, n_past),
            "memory ms, compute ms: the step's bytes and operations at these speeds; the longer one is the roof.",
        ],
    )  # fmt: skip


def roofline_row(
    work: StepWork, speed: DeviceSpeed, batch_size: int, n_past: int, seconds: list[float]
) -> dict[str, Any]:
    """The row of a batch size. `seconds`: measured times of its steps."""
    n_bytes, flops = work.n_bytes(batch_size, n_past), work.flops(batch_size, n_past)
    memory, compute = n_bytes / speed.bytes_per_s, flops / speed.flops
    return {
        "batch_size": batch_size, "mib": n_bytes / 2**20, "gflop": flops / 1e9, "intensity": flops / n_bytes,
        "memory_ms": 1000 * memory, "compute_ms": 1000 * compute, "bound": "compute" if compute > memory else "memory",
        "step_ms": Spread.of(1000 * each for each in seconds),
        "of_roof": Spread.of(100 * max(memory, compute) / each for each in seconds),
        "tokens_per_s": Spread.of(batch_size / each for each in seconds),
        "flops": Spread.of(flops / each for each in seconds),
    }  # fmt: skip


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


# --- roofline plot ---------------------------------------------------------------------------------------------------


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
