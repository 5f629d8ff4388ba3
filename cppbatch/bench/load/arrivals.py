"""When requests are sent: by clients that wait for each answer, or at a rate whatever the server does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from time import perf_counter

from cppbatch.bench.load.workload import LoadRequest

Send = Callable[[LoadRequest, float], Awaitable[None]]
"""Sends a request; its latencies count from the second given, on the clock of `perf_counter`."""


async def closed_loop(requests: Sequence[LoadRequest], send: Send, n_clients: int) -> None:
    """`n_clients` clients, each of which sends its next request as soon as it has its answer."""
    left = iter(requests)

    async def client() -> None:
        for request in left:
            await send(request, perf_counter())

    await asyncio.gather(*(client() for _ in range(n_clients)))


async def open_loop(requests: Sequence[LoadRequest], send: Send, times: Sequence[float]) -> None:
    """Each request at its time, in seconds from now.

    Its latency counts from then, even if this process is late: else a server that slows the client down would look
    better than it is.
    """
    began = perf_counter()

    async def at(request: LoadRequest, due: float) -> None:
        await asyncio.sleep(due - perf_counter())
        await send(request, due)

    await asyncio.gather(*(at(request, began + time) for request, time in zip(requests, times, strict=True)))


def poisson_arrivals(n: int, rate: float, seed: int, repeat: int) -> list[float]:
    """When `n` requests arrive, in seconds, `rate` of them a second on average; the first at 0."""
    rng = Random(f"{seed}/{repeat}/arrivals")
    return [0.0, *itertools.accumulate(rng.expovariate(rate) for _ in range(n - 1))]
