"""Plots of benchmarks: each point is inside the frame, and the memory plot shows what is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cppbatch.bench import memory_report
from cppbatch.bench.report import Report, Spread, save_figure
from cppbatch.bench.roofline import plot_roofline
from cppbatch.bench.speculation_speedup import plot_speedup
from cppbatch.bench.strategies.compare_strategies import plot_strategies
from cppbatch.bench.throughput import plot_throughput
from cppbatch.bench.tune.tuning_report import plot_tuning
from cppbatch.config import EngineConfig
from cppbatch.sizing.buffers import Buffer
from cppbatch.sizing.demand import HOST, Demand
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate
from cppbatch.sizing.machine import this_machine

GIB, MIB = 2**30, 2**20


def report(rows: list[dict[str, Any]], **settings: Any) -> Report:
    return Report(
        kind="k", title="a-model: a title", machine=this_machine(with_llama=False), settings=settings, columns=[],
        rows=rows,
    )  # fmt: skip


def spread(value: float) -> Spread:
    return Spread(value, 0.9 * value, 1.2 * value)


def throughput() -> Figure:
    phases = {name: spread(value) for name, value in (("plan", 1e-4), ("decode", 1e-2), ("sample", 2e-4))}
    rows = [
        {
            "kv_layout": layout, "flash_attn": "on", "kind": "greedy", "batch_size": n, "decode": spread(50 * n),
            "bare_decode": spread(60 * n), "prefill": spread(300 + n), "bare_prefill": spread(310 + n),
            "phases_ms": phases,
        }
        for layout in ("unified", "per-sequence") for n in (1, 4, 16)
    ]  # fmt: skip
    return plot_throughput(report(rows))


def speedup() -> Figure:
    rows = [
        {"workload": name, "batch_size": n, "speedup": spread(2 / n), "acceptance_percent": 50.0}
        for name in ("edit", "chat") for n in (1, 8)
    ]  # fmt: skip
    return plot_speedup(report(rows))


def roofline() -> Figure:
    rows = [{"batch_size": n, "intensity": 0.5 * n, "flops": spread(1e9 * n)} for n in (1, 4, 16, 64)]
    return plot_roofline(report(rows, bytes_per_s=2e10, flops=1e11))


def strategies() -> Figure:
    times = ("first_token_p50", "first_token_p95", "latency_p50", "latency_p95")
    rows = [
        {
            "batch_size": 4,
            "strategy": name,
            "tokens_per_second": spread(value),
            **{key: spread(value / 9) for key in times},
        }
        for name, value in (("sequential", 100.0), ("static", 150.0), ("continuous", 260.0))
    ]
    return plot_strategies(report(rows))


def strategies_by_batch() -> Figure:
    rows = [
        {"batch_size": n, "strategy": name, "tokens_per_second": spread(n * value), "latency_p95": spread(n / value)}
        for name, value in (("sequential", 10.0), ("continuous", 26.0))
        for n in (1, 8, 64)
    ]
    return plot_strategies(report(rows))


def tuning() -> Figure:
    curve = [{"n_parallel": n, "tokens_per_s": 20.0 * n, "inter_token_ms": 9.0 * n} for n in (1, 2, 4, 8)]
    return plot_tuning(report([], curve=curve, speed=curve[2]))


def lines(figure: Figure) -> list[tuple[Any, Any]]:
    """(axes, line) of all drawn lines that have points."""
    return [(axes, line) for axes in figure.axes for line in axes.get_lines() if line.get_marker() != "None"]


@pytest.mark.parametrize("draw", [throughput, speedup, roofline, strategies, strategies_by_batch, tuning])
def test_each_point_is_inside_the_frame(draw: Any, tmp_path: Path) -> None:
    figure: Figure = draw()
    save_figure(figure, tmp_path / "plot.png")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # lays it out
    renderer: Any = canvas.get_renderer()
    for axes, line in lines(figure):
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert all(left < x < right for x in line.get_xdata())
        assert all(low <= y < high for y in line.get_ydata())
    for axes in figure.axes:
        frame = axes.get_window_extent(renderer)
        for text in axes.texts:
            box = text.get_window_extent(renderer)
            assert frame.x0 <= box.x0, text.get_text()
            assert box.x1 <= frame.x1, text.get_text()
            assert box.y1 <= frame.y1, text.get_text()
    suptitle: Any = figure.get_suptitle()
    assert "a-model" in suptitle


def test_throughput_shows_prefill_decode_and_the_rest_of_a_step() -> None:
    titles = [axes.get_title() for axes in throughput().axes]
    assert titles == [
        "prefill tokens/s; dashed: bare llama_decode",
        "decode tokens/s; dashed: bare llama_decode",
        "microseconds of a step outside llama_decode",
    ]


@pytest.mark.parametrize(
    ("free", "label", "line_at"),
    [(3 * GIB, "free: 3.00 GiB", 3 * 1024), (500 * GIB, "free: 500.00 GiB, above this plot", None)],
)
def test_the_memory_plot_shows_what_is_free_and_the_areas_stay_readable(
    free: int, label: str, line_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = memory_plot(Demand(where=HOST, free=free, firm=1), monkeypatch)
    for axes in figure.axes:
        line: Any = axes.get_lines()[0]
        assert line.get_label() == label
        assert bool(line.get_ydata()[0] == line_at) is (line_at is not None)
        assert axes.get_ylim()[1] >= (line_at or 0)
        assert axes.get_ylim()[1] < 20 * 1024
        assert axes.get_ylabel() == "MiB, host"


def test_with_a_gpu_the_memory_plot_shows_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = memory_plot(Demand(where="CUDA0", free=8 * GIB, firm=1), monkeypatch)
    assert {axes.get_ylabel() for axes in figure.axes} == {"MiB, CUDA0"}
    labels = figure.axes[1].get_legend_handles_labels()[1]
    assert labels == ["KV cells", "free: 8.00 GiB"]  # and not the process on the host


def memory_plot(demand: Demand, monkeypatch: pytest.MonkeyPatch) -> Figure:
    place = "CPU" if demand.where == HOST else demand.where

    def estimate(configs: list[EngineConfig]) -> MemoryEstimate:
        footprints = [
            Footprint(buffers=[Buffer("cells", place, config.n_ctx * MIB // 8), Buffer("process", "CPU", 80 * MIB)])
            for config in configs
        ]
        return MemoryEstimate(footprints, [Device("CUDA0", "a GPU", 8 * GIB, 9 * GIB)])

    monkeypatch.setattr(memory_report, "estimate_memory", estimate)
    host = [] if demand.where == HOST else [Demand(where=HOST, free=GIB, firm=1)]
    settings = {"config": EngineConfig("a-model.gguf"), "demands": [*host, demand]}
    return memory_report.plot_memory(report([], **settings))
