"""The plot of `cppbatch bench strategies`: tokens/s and latencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cppbatch.bench.plot import from_zero, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cppbatch.bench.report import Report

_TIMES = {
    "first_token_p50": "TTFT p50", "first_token_p95": "TTFT p95",
    "latency_p50": "latency p50", "latency_p95": "latency p95",
}  # fmt: skip


def plot_strategies(report: Report) -> Figure:
    """Plots bars for each strategy, with their range over the repeats; lines over several numbers of sequences."""
    figure, (speed, times) = new_figure(report, 2)
    sizes = list(dict.fromkeys(row["batch_size"] for row in report.rows))
    if len(sizes) > 1:
        for axes, key, title in (
            (speed, "tokens_per_second", "generated tokens/s"), (times, "latency_p95", "latency p95, seconds"),
        ):  # fmt: skip
            for name in dict.fromkeys(row["strategy"] for row in report.rows):
                rows = [row for row in report.rows if row["strategy"] == name]
                axes.plot([row["batch_size"] for row in rows], [row[key].median for row in rows], "o-", label=name)
            axes.set_title(title)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, list(map(str, sizes)))
            axes.set_xlabel("sequences at once (B)")
            from_zero(axes)
        speed.legend(fontsize=7)
        return figure
    names = [row["strategy"] for row in report.rows]
    places = range(len(names))
    values = [row["tokens_per_second"] for row in report.rows]
    speed.bar(places, [v.median for v in values], yerr=_bars(values), capsize=3)
    speed.set_title("generated tokens/s")
    width = 0.8 / len(_TIMES)
    for i, (key, label) in enumerate(_TIMES.items()):
        values = [row[key] for row in report.rows]
        at = [place + (i - 1.5) * width for place in places]
        colour = "tab:orange" if key.startswith("first") else "tab:blue"
        alpha = 0.5 if key.endswith("50") else 1.0
        times.bar(at, [v.median for v in values], width, yerr=_bars(values), label=label, color=colour, alpha=alpha)
    times.set_title("seconds from arrival")
    times.margins(y=0.3)  # room for the legend
    times.legend(loc="upper center", ncols=2)
    for axes in (speed, times):
        axes.set_xticks(places, names, rotation=20)
    return figure


def _bars(values: list[Any]) -> list[list[float]]:
    return [[v.median - v.low for v in values], [v.high - v.median for v in values]]
