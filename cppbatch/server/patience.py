"""For those who have many requests and time to wait: they ask a full queue again, and take no more than half of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from time import perf_counter

import msgspec

from cppbatch.cluster.engine_client import EngineClient
from cppbatch.engine.params import replaced
from cppbatch.engine.request import GenerationEvent, GenerationRequest
from cppbatch.errors import QueueFull

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds, before a full queue is asked again


async def enough(client: EngineClient) -> int:
    """Requests that keep the engine busy: those that run, and some to follow them, but at most half of the queue."""
    running = client.config.n_parallel * len(await client.workers())
    return running + min(running, client.config.max_queue // 2)


async def submit_patiently(
    client: EngineClient, request: GenerationRequest, began: float
) -> AsyncGenerator[GenerationEvent, None]:
    """`client.submit`, again for as long as the queue is full and the request's own time allows.

    Its times, and the limits on them, count from `began` (`perf_counter`).
    """
    pause = _FIRST_PAUSE
    while True:
        waited = perf_counter() - began
        told = False
        try:
            async with contextlib.aclosing(client.submit(_later(request, waited))) as stream:
                async for event in stream:
                    told = True
                    yield _since(event, waited)
                return
        except QueueFull:
            if told or waited >= _patience(request):
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _patience(request: GenerationRequest) -> float:
    return min(float("inf") if limit is None else limit for limit in (request.timeout, request.queue_timeout))


def _later(request: GenerationRequest, waited: float) -> GenerationRequest:
    """The request as it is after so many seconds of waiting."""
    left = {
        name: max(0.0, seconds - waited)
        for name in ("timeout", "queue_timeout")
        if (seconds := getattr(request, name)) is not None
    }
    return replaced(request, **left) if left else request


def _since(event: GenerationEvent, waited: float) -> GenerationEvent:
    """An event whose times count from so many seconds before."""
    if event.usage is None:
        return event
    usage = msgspec.structs.replace(
        event.usage,
        queue_seconds=event.usage.queue_seconds + waited,
        first_token_seconds=event.usage.first_token_seconds + waited if event.usage.first_token_seconds else 0.0,
        total_seconds=event.usage.total_seconds + waited,
    )
    return msgspec.structs.replace(event, usage=usage)
