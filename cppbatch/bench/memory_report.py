"""The report and the plot of `cppbatch memory`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
from msgspec.structs import replace

from cppbatch.bench.report import Column, Report, doubling_axis, new_figure, plot_line
from cppbatch.config import MAX_SEQ_IDS, EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.media.input import CACHE_BYTES
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.runtime import load_runtime
from cppbatch.errors import ModelError
from cppbatch.llama import Backend
from cppbatch.sizing.buffers import MAPPED, Buffer, read_engine_buffers
from cppbatch.sizing.demand import HOST, Demand, format_gib, location, memory_demands
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory, this_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NAMES = {
    "weights": "weights", "adapters": "LoRA adapters", "cells": "KV cells", "states": "recurrent states",
    "compute": "compute buffers", "projector": "projector (mmproj)", "encoding": "encoding of images and audio",
    "vectors": "image and audio vectors of a step",
    "output": "rows of logits", "engine": "copies of logits", "drafts": "logits of drafts",
    "hidden": "hidden rows",
    "process": "process",
}  # fmt: skip
_SHORT = 100  # tokens
_NEAR = 2.5  # times the largest demand: up to this limit, free memory is a line in the plot
_NOT_LOGGED = ("projector", "vectors", "process", "engine", "drafts", "hidden")  # not in llama.cpp's log


def memory_report(config: EngineConfig, *, margin: float = 0.0) -> Report:
    """Compares an engine's estimated memory with free memory. Raises `EstimateFailed`, `ModelError`.

    `margin`: the fraction of free memory that must stay free, 0 to 1.
    """
    estimate = estimate_memory([config])
    footprint = _check_footprints(estimate)[0]
    needed = memory_demands(estimate, free_host_memory(), margin=margin)
    return Report(
        kind="memory",
        title=f"{Path(config.model_path).stem}: memory of -c {config.n_ctx} -np {config.n_parallel}, "
        f"{footprint.kv_layout}",
        machine=this_machine(),
        model=config.model_path,
        settings={
            "config": config,
            "sequence_cells": footprint.sequence_cells,
            "demands": needed,
            "devices": estimate.devices,
        },
        columns=[Column("what", ""), Column("where", "where"), Column("predicted_mib", "MiB", 1)],
        rows=[_row(buffer, estimate.devices) for buffer in _merge_buffers(footprint.buffers)],
        notes=[*map(_verdict, needed), _limits(config), *describe_sequences(footprint, config)],
    )


def describe_sequences(footprint: Footprint, config: EngineConfig) -> Iterator[str]:
    """The memory of a short and a long sequence, and the number of checkpoints that fit into host memory."""
    memory, long = footprint.sequence, min(footprint.sequence_cells, footprint.n_ctx_train or footprint.sequence_cells)
    if not memory.checkpoint_bytes(long):
        return
    window = f"a window of {memory.window} tokens: {_mib(memory.window * memory.window_token_bytes)}"
    states = f"states: {_mib(memory.state_bytes)}"
    parts = "; ".join([window] * (memory.window > 0) + [states] * (memory.state_bytes > 0))
    yield (
        f"a sequence of {_SHORT} tokens uses {_mib(memory.bytes_of(_SHORT))}, one of {long} tokens "
        f"{_mib(memory.bytes_of(long))} ({parts})"
    )
    if config.prefix_cache and config.prefix_cache_ram:
        size = memory.bytes_of(long) if not memory.token_bytes else memory.checkpoint_bytes(long)
        n = config.prefix_cache_ram * 2**20 // size
        yield f"a checkpoint takes up to {_mib(size)}: --prefix-cache-ram {config.prefix_cache_ram} holds {n}"


def with_measured(report: Report, taken: MeasuredMemory) -> Report:
    """Returns the report with measured values next to the estimates."""
    devices: Sequence[Device] = report.settings["devices"]
    measured: Counter[tuple[str, str]] = Counter()
    for buffer in taken.buffers:
        measured[_name(buffer), _where(buffer, devices)] += buffer.n_bytes
    rows = [_with_measured(row, measured.get((row["what"], row["where"]))) for row in report.rows]
    firm = sum(round(row["predicted_mib"] * 2**20) for row in report.rows if row["kind"] != "process")
    grown = f"{format_gib(taken.process)} of {format_gib(firm)}"
    notes = [f"this process grew by {grown}; memory that has not been used yet is not included"]
    notes += [f"{name} has {format_gib(n)} less free" for name, n in taken.devices.items()]
    columns = [*report.columns, Column("measured_mib", "measured", 1), Column("difference", "difference %", 1)]
    return replace(report, columns=columns, rows=rows, notes=[*report.notes, *notes])


def plot_memory(report: Report) -> Figure:
    """Plots memory by context size, and by parallelism with constant cells per sequence, for the place of the KV cells
    (host or GPU), with a line at its free memory. Runs additional estimates."""
    config: EngineConfig = report.settings["config"]
    contexts = [config.n_ctx * part // 8 for part in range(1, 17) if config.n_ctx * part // 8 >= config.n_parallel]
    each = config.n_ctx // config.n_parallel
    parallel = [n for n in (1 << i for i in range(9)) if n <= min(MAX_SEQ_IDS, config.n_batch, 4 * config.n_parallel)]
    by_context = [replace(config, n_ctx=n) for n in contexts]
    by_parallel = [replace(config, n_parallel=n, n_ctx=n * each) for n in parallel]
    estimate = estimate_memory([*by_context, *by_parallel])
    demand = max(report.settings["demands"], key=lambda demand: demand.where != HOST)  # a GPU, if one is used
    layers = [_layers(footprint, estimate.devices, demand.where) for footprint in _check_footprints(estimate)]
    figure, (left, right) = new_figure(report, 2)
    _areas(left, contexts, layers[: len(contexts)], demand)
    left.set_xlabel(f"-c, with -np {config.n_parallel}")
    _areas(right, parallel, layers[len(contexts) :], demand)
    right.set_xlabel(f"-np, with {each} cells each")
    right.legend(loc="upper left", fontsize=8)
    return figure


def _layers(footprint: Footprint, devices: Sequence[Device], place: str) -> dict[str, float]:
    """The MiB of each kind of buffer in one place."""
    layers: Counter[str] = Counter()
    for buffer in footprint.buffers:
        if location(buffer, devices) == place:
            layers[buffer.kind] += buffer.n_bytes
    return {kind: n / 2**20 for kind, n in layers.items()}


def _areas(axes: Any, sizes: list[int], layers: list[dict[str, float]], demand: Demand) -> None:
    kinds = [kind for kind in _NAMES if any(kind in each for each in layers)]
    heights = [[each.get(kind, 0.0) for each in layers] for kind in kinds]
    axes.stackplot(sizes, heights, labels=[_NAMES[kind] for kind in kinds], alpha=0.8)
    free, top = demand.free / 2**20, max(sum(each.values()) for each in layers)
    is_near = free <= _NEAR * top  # otherwise the areas would be too flat to read
    label = f"free: {format_gib(demand.free)}" + ("" if is_near else ", above this plot")
    axes.plot(sizes, [free if is_near else float("nan")] * len(sizes), color="tab:red", linestyle="--", label=label)
    axes.set_ylim(0, 1.1 * max(top, free if is_near else 0.0))
    axes.set_xlim(sizes[0], sizes[-1])
    axes.set_ylabel(f"MiB, {demand.where}")


def _check_footprints(estimate: MemoryEstimate) -> list[Footprint]:
    for footprint in estimate.footprints:
        if footprint.error:
            raise ModelError(footprint.error)
    return estimate.footprints


def _merge_buffers(buffers: list[Buffer]) -> list[Buffer]:
    """Merges buffers of the same kind and type, in the order of `_NAMES`, then those of a draft model or head."""
    sizes: Counter[Buffer] = Counter()
    for buffer in buffers:
        sizes[replace(buffer, n_bytes=0)] += buffer.n_bytes
    order = list(_NAMES)
    ordered = sorted(sizes.items(), key=lambda item: (item[0].owner, order.index(item[0].kind)))
    return [replace(buffer, n_bytes=n) for buffer, n in ordered]


def _name(buffer: Buffer) -> str:
    return f"{buffer.owner}: {_NAMES[buffer.kind]}" if buffer.owner else _NAMES[buffer.kind]


def _row(buffer: Buffer, devices: Sequence[Device]) -> dict[str, Any]:
    return {
        "what": _name(buffer), "where": _where(buffer, devices), "predicted_mib": buffer.n_bytes / 2**20,
        "kind": buffer.kind, "place": buffer.buffer_type,
    }  # fmt: skip


def _where(buffer: Buffer, devices: Sequence[Device]) -> str:
    if buffer.buffer_type == MAPPED:
        return "host, the file itself"
    place = location(buffer, devices)
    repacked = place == HOST and buffer.kind == "weights"
    return f"{place}, repacked ({buffer.buffer_type})" if repacked else place


def _with_measured(row: dict[str, Any], n_bytes: int | None) -> dict[str, Any]:
    if n_bytes is None or row["kind"] in _NOT_LOGGED:
        return row
    measured = n_bytes / 2**20
    return {**row, "measured_mib": measured, "difference": 100 * (row["predicted_mib"] / measured - 1)}


def _verdict(demand: Demand) -> str:
    file = f", and {format_gib(demand.mapped)} of the file" if demand.mapped else ""
    fits = "will fit" if demand.will_fit else "will NOT fit"
    slow = "; but the weights will not stay in memory" if demand.will_be_slow else ""
    kept = f", of which {100 * demand.margin:g}% must stay free" if demand.margin else ""
    return f"{demand.where}: {format_gib(demand.firm)}{file}; {format_gib(demand.free)} free{kept}: {fits}{slow}"


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:.3g} MiB"


def _limits(config: EngineConfig) -> str:
    vectors = f", and {CACHE_BYTES >> 20} for image and audio vectors" if config.mmproj else ""
    return (
        f"if cells run out or the layout changes: up to {config.swap_space} MiB of additional host memory for "
        f"sequences (--swap-space) and {config.prefix_cache_ram} for prefixes (--prefix-cache-ram){vectors}"
    )


# --- measure memory --------------------------------------------------------------------------------------------------


_NEW_TOKENS = 4


class MeasuredMemory(msgspec.Struct, frozen=True):
    """Measured memory in bytes."""

    buffers: list[Buffer]
    """The buffers that llama.cpp logged."""
    process: int
    """Growth of the process's resident memory, without pages that were never written."""
    devices: dict[str, int]
    """Decrease of free memory, by device."""


def measure_memory(config: EngineConfig) -> MeasuredMemory:
    """Loads the model and runs every sequence, so that the memory is resident and not only allocated."""
    backend, process = Backend.get(), psutil.Process()
    free_before, resident_before = _free(backend), process.memory_info().rss
    with backend.lines() as lines:
        runtime = load_runtime(config)
    with BatchInferenceEngine(config, runtime=runtime) as engine:
        info = engine.info
        n_prompt = max(1, min(-(-config.n_ubatch // config.n_parallel), info.max_sequence - _NEW_TOKENS))
        most = info.n_vocab - 1
        prompts = [[(7 * i + 3 * k) % most + 1 for k in range(n_prompt)] for i in range(config.n_parallel)]
        if info.pooling:
            engine.embed(prompts, progress=False)
        else:
            params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, temperature=0)
            engine.generate(prompts, params, progress=False)
        return MeasuredMemory(
            read_engine_buffers(lines),
            process.memory_info().rss - resident_before,
            {name: free_before[name] - free for name, free in _free(backend).items()},
        )


def _free(backend: Backend) -> dict[str, int]:
    return {device.name: device.memory_free for device in backend.devices() if "GPU" in device.kind}


# --- memory overhead -------------------------------------------------------------------------------------------------
# The memory of an engine for several sequences relative to one for a single sequence: `cppbatch memory --overhead`.


GOAL = 50.0
"""Maximum memory of a batch, in percent over one sequence."""
_SIZES = (3, 8, 16, 32, 64)
_LENGTHS = (64, 128, 240, 512, 1024, 2048)


def memory_overhead(config: EngineConfig) -> Report:
    """The memory that llama.cpp allocates by number and length of sequences, in percent over one sequence of that
    length.

    Weights count once in both. Raises `EstimateFailed`, `ModelError`.
    """
    wanted = [
        replace(config, n_parallel=n, n_ctx=n * length, max_queue=max(config.max_queue, n))
        for length in _LENGTHS
        for n in (1, *_SIZES)
    ]
    rows: dict[int, dict[str, Any]] = {n: {"batch_size": n} for n in _SIZES}
    alone, over = 0, []
    for each, footprint in zip(wanted, estimate_memory(wanted).footprints, strict=True):
        if footprint.error:
            raise ModelError(footprint.error)
        n, n_bytes = each.n_parallel, sum(buffer.n_bytes for buffer in footprint.buffers)
        if n == 1:
            alone = n_bytes
            continue
        length = each.n_ctx // n
        percent = rows[n][f"over_{length}"] = 100 * (n_bytes / alone - 1)
        if percent > GOAL:
            over.append((n, length, percent))
    first = min(over, key=lambda found: found[0] * found[1], default=None)
    verdict = f"the goal of {GOAL:.0f}% over one sequence is met everywhere"
    if first:
        n, length, percent = first
        verdict = (
            f"the goal of {GOAL:.0f}% over one sequence is exceeded at {len(over)} of {len(_SIZES) * len(_LENGTHS)} "
            f"sizes, first with {n} sequences of {length} tokens ({percent:.1f}%)"
        )
    return Report(
        kind="memory overhead",
        title=f"{Path(config.model_path).stem}: percent of memory over one sequence of that length",
        machine=this_machine(),
        model=config.model_path,
        settings={"config": config, "goal_percent": GOAL, "demands": []},
        columns=[Column("batch_size", "B"), *(Column(f"over_{length}", f"{length} tokens") for length in _LENGTHS)],
        rows=list(rows.values()),
        notes=[f"{verdict}; -ctk q8_0 -ctv q8_0 halves the cells."],
    )


def plot_overhead(report: Report) -> Figure:
    """Plots a line for each length, and the goal."""
    figure, (axes,) = new_figure(report)
    for length in _LENGTHS:
        plot_line(axes, _SIZES, (row[f"over_{length}"] for row in report.rows), label=f"{length} tokens")
    axes.axhline(GOAL, color="tab:red", linestyle="--", label=f"goal: {GOAL:.0f}%")
    doubling_axis(axes, _SIZES, "sequences at once (B)")
    axes.set_ylabel("% over one sequence")
    axes.legend(fontsize=7)
    return figure
