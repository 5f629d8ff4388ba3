"""The same load on one or more servers in turn, and the report about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter, process_time
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from cppbatch.bench.load.arrivals import closed_loop, open_loop, poisson
from cppbatch.bench.load.client import Client, Endpoint
from cppbatch.bench.load.notes import notes
from cppbatch.bench.load.results import Run, columns, row
from cppbatch.bench.load.target import Target, look
from cppbatch.bench.load.workload import Request, Workload, warm_up
from cppbatch.bench.machine import this_machine
from cppbatch.bench.report import Report, cell
from cppbatch.bench.spread import Spread
from cppbatch.errors import ConfigError

Progress = Callable[[str, int, int], None]
"""A server's label, the repeat, and how many of its requests have ended."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, and how. Raises `ConfigError`."""

    workload: Workload
    concurrency: int = 16
    """Clients of the closed loop."""
    rate: float | None = None
    """Requests a second, in an open loop; None: a closed loop."""
    endpoint: Endpoint = "completions"
    model: str | None = None
    """None: the first that each server has."""
    api_key: str | None = None
    warmup: int = 4
    """Requests to each server before all else."""
    repeats: int = 3
    seed: int
    latency_bound_ms: float | None = None
    """Requests whose first text came within it are good ones."""
    timeout: float = 300
    """Seconds for a request."""

    def __post_init__(self) -> None:
        counts = [("--concurrency", self.concurrency, 1), ("--repeats", self.repeats, 1), ("--warmup", self.warmup, 0)]
        for flag, value, least in counts:
            if value < least:
                raise ConfigError(f"{flag} is {value}; it must be {least} or more")
        above_zero = {"--rate": self.rate, "--timeout": self.timeout, "--latency-bound-ms": self.latency_bound_ms}
        for flag, number in above_zero.items():
            if number is not None and not 0 < number < float("inf"):
                raise ConfigError(f"{flag} is {number:g}; it must be above 0")

    def how(self) -> str:
        """For a title."""
        arrivals = f"{self.rate:g} a second" if self.rate else f"{self.concurrency} at once"
        times = f", {self.repeats} times" if self.repeats > 1 else ""
        return f"{self.workload.n_requests} requests, {arrivals}{times}, seed {self.seed}"


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


def compare(targets: Sequence[Target], load: Load, progress: Progress) -> LoadReport:
    """Puts the same load on these servers in turn, repeat by repeat; the prompts of each repeat are new.

    Raises `UnusableServer` before any load. Ctrl-C ends it early: what was measured until then is in the report.
    """
    runs: list[Run] = []
    try:
        asyncio.run(_measure(targets, load, runs, progress))
    except KeyboardInterrupt:
        if not any(run.outcomes for run in runs):
            raise
    rows, sentences = [], _how_to_read(load)
    for target in targets:
        if told := _worth_telling([run for run in runs if run.server.label == target.label]):
            rows.append(row(told, load.latency_bound_ms))
            sentences += notes(told)
    n_whole, n_wanted = sum(run.is_whole for run in runs), load.repeats * len(targets)
    if n_whole < n_wanted:
        sentences.append(f"Interrupted: {n_whole} of {n_wanted} runs were finished.")
    settings: dict[str, Any] = {**msgspec.to_builtins(load), "api_key": None}
    return LoadReport(
        kind="serve",
        title=f"Load ({load.workload})\n{load.how()}",
        machine=this_machine(with_llama=False),
        settings=settings,
        columns=columns(rows),
        rows=rows,
        notes=sentences,
    )


async def _measure(targets: Sequence[Target], load: Load, runs: list[Run], progress: Progress) -> None:
    servers = [
        await look(target, model=load.model, endpoint=load.endpoint, api_key=load.api_key, timeout=load.timeout)
        for target in targets
    ]
    for server in servers:
        run = Run(server=server, repeat=-1, n_requests=load.warmup)
        await _run(run, warm_up(load.workload, load.warmup, load.seed), load, progress)
    for repeat in range(load.repeats):
        requests = load.workload.requests(load.seed, repeat)
        for server in servers:
            runs.append(Run(server=server, repeat=repeat, n_requests=len(requests)))
            await _run(runs[-1], requests, load, progress)


async def _run(run: Run, requests: Sequence[Request], load: Load, progress: Progress) -> None:
    """Fills in the run, also when it is cancelled."""
    progress(run.server.label, run.repeat, 0)
    began, computed = perf_counter(), process_time()
    async with Client(run.server, load.timeout) as client:

        async def send(request: Request, due: float) -> None:
            run.outcomes.append(await client.send(request, due))
            progress(run.server.label, run.repeat, len(run.outcomes))

        try:
            if load.rate and run.repeat >= 0:
                times = poisson(len(requests), load.rate, load.seed, run.repeat)
                await open_loop(requests, send, times)
            else:
                await closed_loop(requests, send, load.concurrency)
            run.is_whole = True
        finally:
            run.seconds, run.client_seconds = perf_counter() - began, process_time() - computed


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
