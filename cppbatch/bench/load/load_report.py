"""The report of a load test: servers side by side, with notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from cppbatch.bench.load.results import LoadIdeal, ServerRun, run_figures, server_row, table_columns
from cppbatch.bench.load.workload import LoadSettings
from cppbatch.bench.report import Report, Spread, format_cell
from cppbatch.sizing.machine import this_machine

_BUSY = 0.5  # of a core, for the client


class LoadReport(Report, frozen=True, kw_only=True):
    """A row for each server. The table shows servers side by side, with ratios to the first."""

    ratios: dict[str, dict[str, Spread]] = msgspec.field(default_factory=dict)
    """By server and figure: the ratios of the repeats to the first server."""

    def table(self) -> Table:
        """Returns a table with a line for each figure. Title and notes may be wider than the table."""
        first, *others = self.rows
        table = Table()
        table.add_column()
        for each in self.rows:
            table.add_column(Text(each["server"]), justify="right")
        for each in others:
            table.add_column(Text(f"{each['server']} / {first['server']}"), justify="right")
        for column in self.columns:
            values = [each[column.key] for each in self.rows]
            ratios = [_ratio(self.ratios[each["server"]].get(column.key)) for each in others]
            table.add_row(column.title, *(Text(format_cell(value, column.digits)) for value in values), *ratios)
        page = Table.grid()
        page.add_row(Text(self.title))
        page.add_row(table)
        for sentence in (f"Measured from: {self.machine.line()}", *self.notes):
            page.add_row(Text(sentence))
        return page


def make_load_report(
    runs: Sequence[ServerRun], load: LoadSettings, n_servers: int, ideal: LoadIdeal | None = None
) -> LoadReport:
    """Builds the report of runs, in at least one of which a request has ended."""
    sentences = [*_legend(load), _about_ideal(runs, ideal)]
    servers = {run.server.label: run.server for run in runs}
    sentences.append("Models: " + ", ".join(f"{label}: {server.model}" for label, server in servers.items()))
    rows = []
    for label in servers:
        if reported := _reported_runs([run for run in runs if run.server.label == label]):
            rows.append(server_row(reported, load.latency_bound_ms, ideal))
            sentences += server_notes(reported)
    n_finished, n_wanted = sum(run.is_complete for run in runs), load.repeats * n_servers
    if n_finished < n_wanted:
        sentences.append(f"Interrupted: {n_finished} of {n_wanted} runs were finished.")
    settings: dict[str, Any] = {**msgspec.to_builtins(load), "api_key": None}
    return LoadReport(
        kind="serve", title=f"Load ({load.workload})\n{_describe(load, runs[0].n_requests)}",
        machine=this_machine(with_llama=False), settings=settings, columns=table_columns(rows), rows=rows,
        notes=sentences, ratios=_ratios(runs, list(servers), load.latency_bound_ms),
    )  # fmt: skip


def _describe(load: LoadSettings, n_requests: int) -> str:
    arrivals = f"{load.rate:g} a second" if load.rate else f"{load.concurrency} at once"
    times = f", {load.repeats} times" if load.repeats > 1 else ""
    return f"requests: {n_requests}, {arrivals}{times}, seed {load.seed}"


def _reported_runs(runs: Sequence[ServerRun]) -> list[ServerRun]:
    """Returns the complete runs of one server, else the incomplete one."""
    return [run for run in runs if run.is_complete] or [run for run in runs if run.outcomes]


def _legend(load: LoadSettings) -> list[str]:
    sentences = ["TTFT: time to the first text. inter-token: between two pieces of a text."]
    if load.latency_bound_ms:
        sentences.append(f"Goodput: requests whose TTFT is at most {load.latency_bound_ms:g} ms.")
    if load.repeats > 1:
        sentences.append(f"Medians of {load.repeats} repeats, ± half of their range.")
    return sentences


def _about_ideal(runs: Sequence[ServerRun], ideal: LoadIdeal | None) -> str:
    if ideal is None:
        return "-m MODEL adds the row `of ideal`: the minimum cost of the answered requests, divided by the time taken."
    costs = [each for run in runs for each in run.costs]
    token_ms = 1000 * median(each.token_s for each in costs)
    row_ms = 1000 * median(each.row_s(ideal.most_rows) for each in costs)
    return (
        "of ideal: the minimum cost of the answered requests, divided by the time taken. Medians of the costs "
        f"measured between the runs: a prompt token {token_ms:.3g} ms, a row {row_ms:.3g} ms (in steps of up to "
        f"{ideal.most_rows})."
    )


def _ratio(ratio: Spread | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.median:.2f}" if ratio.low == ratio.high else ratio.range_text(2)


def _ratios(runs: Sequence[ServerRun], labels: Sequence[str], bound_ms: float | None) -> dict[str, dict[str, Spread]]:
    """Returns the ratios of each server to the first one, in repeats that both have completed."""
    figures = {(run.server.label, run.repeat): run_figures(run, bound_ms) for run in runs if run.is_complete}
    of_first = {repeat: each for (label, repeat), each in figures.items() if label == labels[0]}
    ratios: dict[str, dict[str, Spread]] = {label: {} for label in labels[1:]}
    for label, of_label in ratios.items():
        pairs = [(figures[label, repeat], first) for repeat, first in of_first.items() if (label, repeat) in figures]
        for key in pairs[0][0] if pairs else ():
            if ratio := Spread.of_ratios((one[key], first[key]) for one, first in pairs):
                of_label[key] = ratio
    return ratios


def server_notes(runs: Sequence[ServerRun]) -> Iterator[str]:
    """Yields sentences about one server that a reader of its figures must know."""
    label, server = runs[0].server.label, runs[0].server
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    done = [outcome for outcome in outcomes if not outcome.failure]
    if not runs[-1].is_complete:
        progress = f"{len(outcomes)} of {runs[-1].n_requests} requests had ended"
        yield f"{label}: interrupted when {progress}; the others are not counted"
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    for kind, n in Counter(failure.kind for failure in failures).most_common():
        first = next(failure for failure in failures if failure.kind == kind)
        yield f"{label}: {n} of {len(outcomes)} requests failed: {kind} ({first})"
    if any(not outcome.has_usage for outcome in done):
        yield f"{label} sends no usage, or one that is too low: each piece of text counts as a token"
    # fewer than 0.9 chunks per token: a server joins tokens
    elif sum(outcome.n_chunks for outcome in done) < 0.9 * sum(outcome.output_tokens for outcome in done):
        yield f"{label} sends several tokens in a piece of text: inter-token times are those between pieces"
    if server.unknown:
        yield f"{label} rejects {' and '.join(server.unknown)}: requests are sent without them"
    if n_early := sum(outcome.ended_early for outcome in done):
        yield f"{label}: {n_early} of {len(done)} texts are shorter than requested"
    if n_again := sum(outcome.resent for outcome in outcomes):
        yield f"{label} closed kept-alive connections: {n_again} requests were sent twice"
    if any(run.client_seconds > _BUSY * run.seconds for run in runs):
        share = max(run.client_seconds / run.seconds for run in runs)
        yield f"{label}: the client took {100 * share:.0f}% of a core and may limit the results"
