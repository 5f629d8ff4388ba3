"""The report about servers that were put under the same load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from cppbatch.bench.load.notes import notes
from cppbatch.bench.load.plan import Load
from cppbatch.bench.load.results import Run, columns, row
from cppbatch.bench.machine import this_machine
from cppbatch.bench.report import Report, cell
from cppbatch.bench.spread import Spread


class LoadReport(Report, frozen=True, kw_only=True):
    """A row for each server. Its table shows them side by side, with ratios to the first."""

    def table(self) -> Table:
        """A line for each figure. What stands above and below may be wider than it."""
        first, *others = self.rows
        table = Table()
        table.add_column()
        for each in self.rows:
            table.add_column(Text(each["server"]), justify="right")
        for each in others:
            table.add_column(Text(f"{each['server']} / {first['server']}"), justify="right")
        for column in self.columns:
            values = [each[column.key] for each in self.rows]
            ratios = [_ratio(value, values[0]) for value in values[1:]]
            table.add_row(column.title, *(Text(cell(value, column.digits)) for value in values), *ratios)
        page = Table.grid()
        page.add_row(Text(self.title))
        page.add_row(table)
        for sentence in (f"Measured from: {self.machine.line()}", *self.notes):
            page.add_row(Text(sentence))
        return page


def side_by_side(runs: Sequence[Run], load: Load, n_servers: int) -> LoadReport:
    """Of at least one run in which a request has ended."""
    sentences = _how_to_read(load)
    servers = {run.server.label: run.server for run in runs}
    sentences.append("Models: " + ", ".join(f"{label}: {server.model}" for label, server in servers.items()))
    rows = []
    for label in servers:
        if told := _worth_telling([run for run in runs if run.server.label == label]):
            rows.append(row(told, load.latency_bound_ms))
            sentences += notes(told)
    n_finished, n_wanted = sum(run.is_whole for run in runs), load.repeats * n_servers
    if n_finished < n_wanted:
        sentences.append(f"Interrupted: {n_finished} of {n_wanted} runs were finished.")
    settings: dict[str, Any] = {**msgspec.to_builtins(load), "api_key": None}
    return LoadReport(
        kind="serve",
        title=f"Load ({load.workload})\n{_how(load, runs[0].n_requests)}",
        machine=this_machine(with_llama=False),
        settings=settings,
        columns=columns(rows),
        rows=rows,
        notes=sentences,
    )


def _how(load: Load, n_requests: int) -> str:
    arrivals = f"{load.rate:g} a second" if load.rate else f"{load.concurrency} at once"
    times = f", {load.repeats} times" if load.repeats > 1 else ""
    return f"requests: {n_requests}, {arrivals}{times}, seed {load.seed}"


def _worth_telling(runs: Sequence[Run]) -> list[Run]:
    """Of one server's: the finished ones, else what there is of the only one."""
    return [run for run in runs if run.is_whole] or [run for run in runs if run.outcomes]


def _how_to_read(load: Load) -> list[str]:
    sentences = ["TTFT: until the first text came. inter-token: between two pieces of a text."]
    if load.latency_bound_ms:
        sentences.append(f"Goodput: requests whose TTFT is at most {load.latency_bound_ms:g} ms.")
    if load.repeats > 1:
        sentences.append(f"Medians of {load.repeats} repeats, ± half of their range.")
    return sentences


def _ratio(value: Any, first: Any) -> str:
    if isinstance(value, Spread) and isinstance(first, Spread) and first.median:
        return f"{value.median / first.median:.2f}"
    return ""
