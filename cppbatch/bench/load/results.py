"""The results of a load test: figures of many requests, and the plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from yarl import URL

from cppbatch.bench.load.client import RequestOutcome, TargetServer
from cppbatch.bench.report import Column, Report, Spread, new_figure, plot_bars
from cppbatch.engine.ideal import BareCosts, RequestSize, ideal_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PERCENTILES = (50, 95, 99)


class _Latency(NamedTuple):
    key: str
    title: str
    per_second: int
    """Units per second: 1000 for milliseconds."""
    digits: int
    percentiles: tuple[int, ...] = PERCENTILES


_LATENCIES = (
    _Latency("ttft_ms", "TTFT, ms", 1000, digits=1),
    _Latency("inter_token_ms", "inter-token, ms", 1000, digits=1, percentiles=(*PERCENTILES, 100)),
    _Latency("tpot_ms", "TPOT, ms", 1000, digits=1),
    _Latency("end_to_end_s", "end-to-end, s", 1, digits=2),
)


class LoadIdeal(NamedTuple):
    """How the ideal time of a load is computed."""

    measure: Callable[[], BareCosts]
    """Takes seconds."""
    most_rows: int
    clients: int | None
    """The number of clients of a closed loop."""

    def of(self, run: ServerRun) -> float | None:
        """The ideal time of what was answered, by the run's; the mean for the costs before and after the run. None: the
        server does not tell the prompts' tokens."""
        done = sorted((outcome for outcome in run.outcomes if not outcome.failure), key=lambda outcome: outcome.due)
        sizes = []
        for outcome in done:
            if outcome.prompt_tokens is None:
                return None
            cached = outcome.cached_tokens or 0
            n_output = max(1, round(outcome.output_tokens / outcome.samples))
            arrives = outcome.due - done[0].due
            sizes.append(RequestSize(outcome.prompt_tokens - cached, n_output, cached, outcome.samples, arrives))
        if not sizes or not run.costs:
            return None
        return fmean(ideal_seconds(sizes, costs, self.most_rows, self.clients) for costs in run.costs) / run.seconds


class ServerRun(msgspec.Struct, kw_only=True):
    """One server under the load of one repeat. The run may be incomplete."""

    server: TargetServer
    repeat: int
    n_requests: int
    outcomes: list[RequestOutcome] = []
    """Results of the requests that have ended."""
    seconds: float = 0
    """From the first request to the end of the last answer."""
    client_seconds: float = 0
    """CPU time of this process."""
    is_complete: bool = False
    costs: list[BareCosts] = []
    """For `of ideal`: before and after the run."""


def table_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Returns the table's columns for these rows."""
    shown = [
        Column("requests", "requests"),
        Column("failed", "of them failed"),
        Column("output_tokens_per_second", "output tokens/s"),
        Column("total_tokens_per_second", "prompt+output tokens/s"),
        Column("requests_per_second", "requests/s", digits=2),
    ]
    optional = [
        Column("of_ideal", "of ideal", digits=2),
        Column("goodput_per_second", "goodput, requests/s", digits=2),
        Column("cached_percent", "prompts from cache, %"),
    ]
    shown += [column for column in optional if any(server_row[column.key] is not None for server_row in rows)]
    for latency in _LATENCIES:
        for p in latency.percentiles:
            title = {PERCENTILES[0]: f"{latency.title}: p{p}", 100: "longest"}.get(p, f"p{p}")
            shown.append(Column(f"{latency.key}_p{p}", title, latency.digits))
    return shown


def server_row(runs: Sequence[ServerRun], bound_ms: float | None, ideal: LoadIdeal | None = None) -> dict[str, Any]:
    """Returns all figures of one server, from at least one run."""
    server, outcomes = runs[0].server, [outcome for run in runs for outcome in run.outcomes]
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    measured = [{**run_figures(run, bound_ms), "of_ideal": ideal.of(run) if ideal else None} for run in runs]
    return {
        "server": server.label, "url": str(URL(server.url).with_user(None)), "model": server.model,
        "requests": len(outcomes), "failed": len(failures),
        "failures": dict(Counter(failure.kind for failure in failures)),
        **{name: Spread.of_known(figures[name] for figures in measured) for name in measured[0]},
    }  # fmt: skip


def run_figures(run: ServerRun, bound_ms: float | None) -> dict[str, float | None]:
    """Returns the figures of one run; None: not measured."""
    done = [outcome for outcome in run.outcomes if not outcome.failure]
    output = sum(outcome.output_tokens for outcome in done)
    figures: dict[str, float | None] = {
        "seconds": run.seconds, "output_tokens_per_second": output / run.seconds, "total_tokens_per_second": None,
        "requests_per_second": len(done) / run.seconds, "goodput_per_second": None, "cached_percent": None,
        "client_cpu_percent": 100 * run.client_seconds / run.seconds,
    }  # fmt: skip
    if prompt := _sum(outcome.prompt_tokens for outcome in done):
        figures["total_tokens_per_second"] = (prompt + output) / run.seconds
        cached = _sum(outcome.cached_tokens for outcome in done)
        figures["cached_percent"] = None if cached is None else 100 * cached / prompt
    if bound_ms is not None:
        within = [outcome for outcome in done if outcome.time_to_first_token * 1000 <= bound_ms]
        figures["goodput_per_second"] = len(within) / run.seconds
    latencies = [
        [outcome.time_to_first_token for outcome in done],
        [gap for outcome in done for gap in outcome.gaps],
        [sum(outcome.gaps) / n for outcome in done if (n := outcome.output_tokens - outcome.samples) > 0],
        [outcome.end_to_end for outcome in done],
    ]
    for latency, seconds in zip(_LATENCIES, latencies, strict=True):
        for p in latency.percentiles:
            value = float(np.percentile(seconds, p)) * latency.per_second if seconds else None
            figures[f"{latency.key}_p{p}"] = value
    return figures


def _sum(counts: Iterable[int | None]) -> int | None:
    """Returns None if a count is unknown or there are none."""
    known = list(counts)
    return sum(each for each in known if each is not None) if known and None not in known else None


# --- load plot -------------------------------------------------------------------------------------------------------


def plot_load(report: Report) -> Figure:
    """Plots bars with their range over the repeats: output tokens/s, TTFT, inter-token time."""
    figure, (speed, ttft, gaps) = new_figure(report, 3)
    labels, places = [row["server"] for row in report.rows], range(len(report.rows))

    def draw(axes: Any, key: str, at: Sequence[float], **style: Any) -> None:
        bars = plot_bars(axes, at, (row[key] for row in report.rows), **style)
        axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=8)

    draw(speed, "output_tokens_per_second", places, width=0.6, color="C0")
    speed.set_title("Output tokens/s (more is better)")
    width = 0.8 / len(PERCENTILES)
    for axes, key, title in ((ttft, "ttft_ms", "TTFT"), (gaps, "inter_token_ms", "Inter-token time")):
        for i, (p, shade) in enumerate(zip(PERCENTILES, (1.0, 0.6, 0.3), strict=True)):
            at = [place + (i - (len(PERCENTILES) - 1) / 2) * width for place in places]
            draw(axes, f"{key}_p{p}", at, width=width, color="C1", alpha=shade, label=f"p{p}")
        axes.set_title(f"{title} in ms (less is better)")
        axes.legend()
    for axes in (speed, ttft, gaps):
        axes.set_xticks(list(places), labels)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)
    return figure
