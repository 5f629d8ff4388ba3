"""The report and the plot of `cppbatch tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cppbatch.bench.report import Column, Report, doubling_axis, new_figure, plot_line
from cppbatch.bench.tune.tuner import MIN_GAIN, TuningResult
from cppbatch.models.batch_gain import gain_notes
from cppbatch.sizing.machine import this_machine
from cppbatch.sizing.profile import as_flags

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_GPU_COLUMN = Column("gpu_percent", "GPU %", 0)


def tuning_report(tuning: TuningResult) -> Report:
    """Reports each measured setting and the chosen ones."""
    chosen = msgspec.to_builtins(tuning.settings())  # without a placement where there is none
    speed = tuning.speed
    return Report(
        kind="tune", title="Settings measured", machine=this_machine(), model=tuning.config.model_path,
        settings={
            "chosen": chosen,
            "speed": msgspec.structs.asdict(speed),
            "curve": [msgspec.structs.asdict(each) for each in tuning.curve],
            "least_gain": MIN_GAIN,
        },
        columns=[
            Column("what", "of"),
            Column("setting", "setting"),
            Column("tokens_per_s", "tokens/s", 1),
            Column("inter_token_ms", "ms between tokens", 1),
            Column("prompt_tokens_per_s", "prompt tokens/s", 0),
            Column("speedup", "x -np 1", 2),
            Column("memory_mib", "MiB", 0),
            Column("memory_overhead", "% over -np 1"),
            *([_GPU_COLUMN] if any(point["gpu_percent"] is not None for point in tuning.points) else []),
            *([Column("error", "failed")] if any(point["error"] for point in tuning.points) else []),
        ],
        rows=[_row(point, tuning) for point in tuning.points],
        notes=[
            f"chosen: {as_flags(chosen)}",
            f"{speed.tokens_per_s:.1f} tokens/s in total, {speed.inter_token_ms:.1f} ms between tokens of a sequence",
            *gain_notes(
                {each.n_parallel: each.tokens_per_s for each in tuning.curve},
                tuning.config.model_path,
                n_gpu_layers=tuning.config.n_gpu_layers,
            ),
            *tuning.notes,
        ],
    )  # fmt: skip


def plot_tuning(report: Report) -> Figure:
    """Plots throughput and latency by parallelism and marks the chosen one."""
    curve, chosen = report.settings["curve"], report.settings["speed"]
    figure, (left, right) = new_figure(report, 2)
    sizes = [each["n_parallel"] for each in curve]
    for axes, key, label in (
        (left, "tokens_per_s", "tokens/s of all sequences"),
        (right, "inter_token_ms", "ms between two tokens of a sequence"),
    ):
        plot_line(axes, sizes, (each[key] for each in curve))
        axes.axvline(chosen["n_parallel"], color="tab:red", linestyle="--", label=f"chosen: {chosen['n_parallel']}")
        doubling_axis(axes, sizes, "-np")
        axes.set_ylabel(label)
    left.legend()
    return figure


def _row(point: dict[str, Any], tuning: TuningResult) -> dict[str, Any]:
    """Replaces 0 (not measured) by None, and compares each parallelism with a single sequence."""
    row = {key: value or None if isinstance(value, float) else value for key, value in point.items()}
    if point["what"] != "parallel" or point["error"]:
        return row
    memory, n = tuning.memory_bytes, point["n_parallel"]
    alone = next((each.tokens_per_s for each in tuning.curve if each.n_parallel == 1), None)
    return {
        **row,
        "speedup": point["tokens_per_s"] / alone if alone else None,
        "memory_mib": memory[n] / 2**20 if n in memory else None,
        "memory_overhead": 100 * (memory[n] / memory[1] - 1) if n in memory and memory.get(1) else None,
    }
