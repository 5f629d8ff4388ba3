"""Puts the same load on one or more servers alternately; requests arrive as asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from time import perf_counter, process_time

from cppbatch.bench.load.client import LoadClient
from cppbatch.bench.load.load_report import LoadReport, make_load_report
from cppbatch.bench.load.results import LoadIdeal, ServerRun
from cppbatch.bench.load.target import Target, probe_server
from cppbatch.bench.load.workload import LoadRequest, LoadSettings, warm_up
from cppbatch.bench.report import order_of_turn
from cppbatch.engine.ideal import BareCosts

Progress = Callable[[str, int, int, int], None]
"""Gets a server's label, the repeat (-1: the warm-up), how many of its requests have ended, and how many there are
(0: no load)."""


def compare_servers(
    targets: Sequence[Target], load: LoadSettings, progress: Progress, ideal: LoadIdeal | None = None
) -> LoadReport:
    """Measures these servers alternately, with new prompts in each repeat. `ideal`: for `of ideal`, whose costs are
    measured before and after each run, because the speed of a shared machine changes.

    Raises `UnusableServer` before any load. Ctrl-C ends the measurement; the report then contains what was measured.
    """
    runs: list[ServerRun] = []
    try:
        asyncio.run(_measure(targets, load, runs, progress, ideal))
    except KeyboardInterrupt:
        if not any(run.outcomes for run in runs):
            raise
    return make_load_report(runs, load, len(targets), ideal)


async def _measure(
    targets: Sequence[Target], load: LoadSettings, runs: list[ServerRun], progress: Progress, ideal: LoadIdeal | None
) -> None:
    def bare_costs(repeat: int) -> list[BareCosts]:
        if ideal is None:
            return []
        progress("cost of the work", repeat, 0, 0)
        return [ideal.measure()]

    servers = [
        await probe_server(target, model=load.model, endpoint=load.endpoint, api_key=load.api_key, timeout=load.timeout)
        for target in targets
    ]
    for server in servers:
        run = ServerRun(server=server, repeat=-1, n_requests=load.warmup)
        await _run(run, warm_up(load.workload, load.warmup, load.seed), load, progress)
    before = bare_costs(0)
    for repeat in range(load.repeats):
        requests = load.workload.requests(load.seed, repeat)
        for server in order_of_turn(servers, repeat):
            runs.append(ServerRun(server=server, repeat=repeat, n_requests=len(requests), costs=before))
            await _run(runs[-1], requests, load, progress)
            after = bare_costs(repeat)
            runs[-1].costs, before = before + after, after


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
                await run_open_loop(requests, send, times)
            else:
                await run_closed_loop(requests, send, load.concurrency)
            run.is_complete = True
        finally:
            run.seconds, run.client_seconds = perf_counter() - began, process_time() - computed


# --- arrivals --------------------------------------------------------------------------------------------------------
# Arrival of requests: a closed loop of waiting clients, or an open loop at a given rate.


Send = Callable[[LoadRequest, float], Awaitable[None]]
"""Sends a request. The second argument is the start of its latencies, on the clock of `perf_counter`."""


async def run_closed_loop(requests: Sequence[LoadRequest], send: Send, n_clients: int) -> None:
    """Runs `n_clients` clients. Each sends its next request as soon as the previous one is answered."""
    left = iter(requests)

    async def client() -> None:
        for request in left:
            await send(request, perf_counter())

    await asyncio.gather(*(client() for _ in range(n_clients)))


async def run_open_loop(requests: Sequence[LoadRequest], send: Send, times: Sequence[float]) -> None:
    """Sends each request at its time, in seconds from now.

    Its latency counts from that time, even if this process is late. Otherwise a server that slows the client down
    would look better than it is.
    """
    began = perf_counter()

    async def at(request: LoadRequest, due: float) -> None:
        await asyncio.sleep(due - perf_counter())
        await send(request, due)

    await asyncio.gather(*(at(request, began + time) for request, time in zip(requests, times, strict=True)))


def poisson_arrivals(n: int, rate: float, seed: int, repeat: int) -> list[float]:
    """Returns the arrival times of `n` requests in seconds, with `rate` requests/s on average. The first is 0."""
    rng = Random(f"{seed}/{repeat}/arrivals")
    return [0.0, *itertools.accumulate(rng.expovariate(rate) for _ in range(n - 1))]
