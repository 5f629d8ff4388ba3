"""The plot of a load test: throughput and latencies of the servers side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cppbatch.bench.load.load_results import PERCENTILES
from cppbatch.bench.plot import new_figure
from cppbatch.bench.report import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cppbatch.bench.report import Report

_SHADES = (1.0, 0.6, 0.3)  # of the percentiles


def plot_load(report: Report) -> Figure:
    """Plots bars with their range over the repeats: output tokens/s, TTFT, inter-token time."""
    figure, (speed, ttft, gaps) = new_figure(report, 3)
    labels = [row["server"] for row in report.rows]
    places = range(len(labels))
    spreads = [row["output_tokens_per_second"] for row in report.rows]
    _bars(speed, places, spreads, width=0.6, color="C0")
    speed.set_title("Output tokens/s (more is better)")
    for axes, key, title in ((ttft, "ttft_ms", "TTFT"), (gaps, "inter_token_ms", "Inter-token time")):
        width = 0.8 / len(PERCENTILES)
        for i, p in enumerate(PERCENTILES):
            moved = [place + (i - (len(PERCENTILES) - 1) / 2) * width for place in places]
            spreads = [row[f"{key}_p{p}"] for row in report.rows]
            _bars(axes, moved, spreads, width=width, color="C1", alpha=_SHADES[i], label=f"p{p}")
        axes.set_title(f"{title} in ms (less is better)")
        axes.legend()
    for axes in (speed, ttft, gaps):
        axes.set_xticks(list(places), labels)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)
    return figure


def _bars(axes: Any, places: Any, spreads: list[Spread | None], **style: Any) -> None:
    """Draws no bar for a figure that was not measured."""
    known = [(place, spread) for place, spread in zip(places, spreads, strict=True) if spread]
    heights = [spread.median for _, spread in known]
    below = [spread.median - spread.low for _, spread in known]
    above = [spread.high - spread.median for _, spread in known]
    bars = axes.bar([place for place, _ in known], heights, yerr=[below, above], capsize=3, **style)
    axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=8)
