"""Arrival of requests: a closed loop of waiting clients, or an open loop at a given rate."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from time import perf_counter

from cppbatch.bench.load.workload import LoadRequest

Send = Callable[[LoadRequest, float], Awaitable[None]]
"""Sends a request. The second argument is the start of its latencies, on the clock of `perf_counter`."""


async def closed_loop(requests: Sequence[LoadRequest], send: Send, n_clients: int) -> None:
    """Runs `n_clients` clients. Each sends its next request as soon as the previous one is answered."""
    left = iter(requests)

    async def client() -> None:
        for request in left:
            await send(request, perf_counter())

    await asyncio.gather(*(client() for _ in range(n_clients)))


async def open_loop(requests: Sequence[LoadRequest], send: Send, times: Sequence[float]) -> None:
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
