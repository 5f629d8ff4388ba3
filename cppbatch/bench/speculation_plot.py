"""The plot of `cppbatch bench throughput --spec`: speedup and acceptance by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cppbatch.bench.plot import from_zero, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cppbatch.bench.report import Report


def plot_speedup(report: Report) -> Figure:
    """Plots a line for each workload."""
    figure, (speedup, acceptance) = new_figure(report, 2)
    for name in dict.fromkeys(row["workload"] for row in report.rows):
        rows = sorted((row for row in report.rows if row["workload"] == name), key=lambda row: row["batch_size"])
        sizes = [row["batch_size"] for row in rows]
        speedup.plot(sizes, [row["speedup"].median for row in rows], "o-", label=name)
        acceptance.plot(sizes, [row["acceptance_percent"] or 0.0 for row in rows], "o-", label=name)
    speedup.axhline(1, color="grey", linewidth=0.8)
    speedup.set_title("tokens/s with drafts / without")
    acceptance.set_title("accepted draft tokens, %")
    for axes in (speedup, acceptance):
        _finish(axes)
    return figure


def _finish(axes: Any) -> None:
    axes.set_xlabel("sequences at once")
    from_zero(axes)
    axes.legend(fontsize=7)
