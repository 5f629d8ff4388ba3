"""Puts the same load on one or more servers in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter, process_time

from cppbatch.bench.load.arrivals import closed_loop, open_loop, poisson_arrivals
from cppbatch.bench.load.load_client import LoadClient
from cppbatch.bench.load.load_report import LoadReport, make_load_report
from cppbatch.bench.load.load_results import LoadIdeal, ServerRun
from cppbatch.bench.load.target import Target, probe_server
from cppbatch.bench.load.workload import LoadRequest, LoadSettings, warm_up

Progress = Callable[[str, int, int, int], None]
"""Gets a server's label, the repeat (-1: the warm-up), how many of its requests have ended, and how many there are."""


def compare_servers(
    targets: Sequence[Target], load: LoadSettings, progress: Progress, ideal: LoadIdeal | None = None
) -> LoadReport:
    """Measures these servers in turn, repeat by repeat, with new prompts in each repeat. `ideal`: for `of ideal`.

    Raises `UnusableServer` before any load. Ctrl-C ends the measurement; the report then contains what was measured.
    """
    runs: list[ServerRun] = []
    try:
        asyncio.run(_measure(targets, load, runs, progress))
    except KeyboardInterrupt:
        if not any(run.outcomes for run in runs):
            raise
    return make_load_report(runs, load, len(targets), ideal)


async def _measure(targets: Sequence[Target], load: LoadSettings, runs: list[ServerRun], progress: Progress) -> None:
    servers = [
        await probe_server(target, model=load.model, endpoint=load.endpoint, api_key=load.api_key, timeout=load.timeout)
        for target in targets
    ]
    for server in servers:
        run = ServerRun(server=server, repeat=-1, n_requests=load.warmup)
        await _run(run, warm_up(load.workload, load.warmup, load.seed), load, progress)
    for repeat in range(load.repeats):
        requests = load.workload.requests(load.seed, repeat)
        for server in servers:
            runs.append(ServerRun(server=server, repeat=repeat, n_requests=len(requests)))
            await _run(runs[-1], requests, load, progress)


async def _run(run: ServerRun, requests: Sequence[LoadRequest], load: LoadSettings, progress: Progress) -> None:
    """Fills in the run, even if it is cancelled."""
    progress(run.server.label, run.repeat, 0, run.n_requests)
    began, computed = perf_counter(), process_time()
    async with LoadClient(run.server, load.timeout) as client:

        async def send(request: LoadRequest, due: float) -> None:
            run.outcomes.append(await client.send(request, due))
            progress(run.server.label, run.repeat, len(run.outcomes), run.n_requests)

        try:
            if load.rate and run.repeat >= 0:
                times = poisson_arrivals(len(requests), load.rate, load.seed, run.repeat)
                await open_loop(requests, send, times)
            else:
                await closed_loop(requests, send, load.concurrency)
            run.is_complete = True
        finally:
            run.seconds, run.client_seconds = perf_counter() - began, process_time() - computed
