"""What an engine for several sequences takes beside one for a single sequence: `cppbatch memory --overhead`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from cppbatch.bench.machine import this_machine
from cppbatch.bench.memory.memory_estimate import estimate_memory
from cppbatch.bench.plot import from_zero, new_figure
from cppbatch.bench.report import Column, Report
from cppbatch.config import EngineConfig
from cppbatch.errors import ModelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOAL = 50.0
"""Percent over one sequence that a batch should take at most."""
_SIZES = (3, 8, 16, 32, 64)
_LENGTHS = (64, 128, 240, 512, 1024, 2048)


def memory_overhead(config: EngineConfig) -> Report:
    """The memory by sequences and their length, in percent over one sequence of that length, as llama.cpp allocates it.

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
        columns=[
            Column("batch_size", "B"),
            *(Column(f"over_{length}", f"{length} tokens") for length in _LENGTHS),
        ],
        rows=list(rows.values()),
        notes=[f"{verdict}; -ctk q8_0 -ctv q8_0 halves the cells."],
    )


def plot_overhead(report: Report) -> Figure:
    """Plots a line for each length, and the goal."""
    figure, (axes,) = new_figure(report)
    sizes = [row["batch_size"] for row in report.rows]
    for length in _LENGTHS:
        axes.plot(sizes, [row[f"over_{length}"] for row in report.rows], "o-", label=f"{length} tokens")
    axes.axhline(GOAL, color="tab:red", linestyle="--", label=f"goal: {GOAL:.0f}%")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_xlabel("sequences at once (B)")
    axes.set_ylabel("% over one sequence")
    from_zero(axes)
    axes.legend(fontsize=7)
    return figure
