"""Figures of many requests: rates and percentiles, with their spread over the repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from yarl import URL

from cppbatch.bench.load.load_client import RequestOutcome, TargetServer
from cppbatch.bench.report import Column, Spread
from cppbatch.engine.ideal import BareCosts, RequestSize, ideal_seconds

PERCENTILES = (50, 95, 99)


class _Latency(NamedTuple):
    key: str
    title: str
    per_second: int
    """Units per second: 1000 for milliseconds."""
    digits: int


_LATENCIES = (
    _Latency("ttft_ms", "TTFT, ms", 1000, digits=1),
    _Latency("inter_token_ms", "inter-token, ms", 1000, digits=1),
    _Latency("end_to_end_s", "end-to-end, s", 1, digits=2),
)


class LoadIdeal(NamedTuple):
    """How the ideal time of a load is computed."""

    costs: BareCosts
    most_rows: int
    clients: int | None
    """Of a closed loop."""

    def of(self, run: ServerRun) -> float | None:
        """The ideal time of what was answered, by the run's; None: the server does not tell the prompts' tokens."""
        done = sorted((outcome for outcome in run.outcomes if not outcome.failure), key=lambda outcome: outcome.due)
        sizes = []
        for outcome in done:
            if outcome.prompt_tokens is None:
                return None
            cached = outcome.cached_tokens or 0
            n_output = max(1, round(outcome.output_tokens / outcome.samples))
            arrives = outcome.due - done[0].due
            sizes.append(RequestSize(outcome.prompt_tokens - cached, n_output, cached, outcome.samples, arrives))
        return ideal_seconds(sizes, self.costs, self.most_rows, self.clients) / run.seconds if sizes else None


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
        for p in PERCENTILES:
            title = f"{latency.title}: p{p}" if p == PERCENTILES[0] else f"p{p}"
            shown.append(Column(f"{latency.key}_p{p}", title, latency.digits))
    return shown


def server_row(runs: Sequence[ServerRun], bound_ms: float | None, ideal: LoadIdeal | None = None) -> dict[str, Any]:
    """Returns all figures of one server, from at least one run."""
    server, outcomes = runs[0].server, [outcome for run in runs for outcome in run.outcomes]
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    measured = [{**_figures(run, bound_ms), "of_ideal": ideal.of(run) if ideal else None} for run in runs]
    return {
        "server": server.label,
        "url": str(URL(server.url).with_user(None)),
        "model": server.model,
        "requests": len(outcomes),
        "failed": len(failures),
        "failures": dict(Counter(failure.kind for failure in failures)),
        **{name: _spread(figures[name] for figures in measured) for name in measured[0]},
    }


def _figures(run: ServerRun, bound_ms: float | None) -> dict[str, float | None]:
    """Returns the figures of one run; None: not measured."""
    done = [outcome for outcome in run.outcomes if not outcome.failure]
    output = sum(outcome.output_tokens for outcome in done)
    figures: dict[str, float | None] = {
        "seconds": run.seconds,
        "output_tokens_per_second": output / run.seconds,
        "total_tokens_per_second": None,
        "requests_per_second": len(done) / run.seconds,
        "goodput_per_second": None,
        "cached_percent": None,
        "client_cpu_percent": 100 * run.client_seconds / run.seconds,
    }
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
        [outcome.end_to_end for outcome in done],
    ]
    for latency, seconds in zip(_LATENCIES, latencies, strict=True):
        for p in PERCENTILES:
            value = float(np.percentile(seconds, p)) * latency.per_second if seconds else None
            figures[f"{latency.key}_p{p}"] = value
    return figures


def _sum(counts: Iterable[int | None]) -> int | None:
    """Returns None if a count is unknown or there are none."""
    known = list(counts)
    return sum(each for each in known if each is not None) if known and None not in known else None


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None
