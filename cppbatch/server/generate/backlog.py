"""Runs many requests through an engine whose queue is shorter than they are many, and loses none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from time import perf_counter

import msgspec

from cppbatch.cluster.client import EngineClient
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest
from cppbatch.errors import EngineClosed, InvalidRequest, QueueFull
from cppbatch.server.errors import fault_of
from cppbatch.server.run import Event

_EVENTS_AHEAD = 2  # of each request, that a slow reader has not taken yet; then they wait
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds, before a full queue is asked again


async def run_backlog(client: EngineClient, requests: list[GenerationRequest]) -> AsyncGenerator[Event, None]:
    """Runs the requests, in their order, and yields (index, event) as events come; closing it cancels all of them.

    Only as many are given to the engine at once as keep it busy: others' requests get in between, and the queue has
    room for them. Time spent here counts as time in the queue. One that cannot run ends with an event that says why.
    """
    at_once = min(len(requests), await _enough(client))
    events: asyncio.Queue[Event] = asyncio.Queue(_EVENTS_AHEAD * at_once + 1)
    left, began = iter(enumerate(requests)), perf_counter()
    lanes = [asyncio.create_task(_lane(client, left, events, began)) for _ in range(at_once)]
    n_left = len(requests)
    try:
        while n_left:
            index, event = await events.get()
            n_left -= event.finish_reason is not None
            yield index, event
    finally:
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)


async def _enough(client: EngineClient) -> int:
    """Requests that keep the engine busy: those that run, and some to follow them, but at most half of the queue."""
    running = client.config.n_parallel * len(await client.workers())
    return running + min(running, client.config.max_queue // 2)


async def _lane(
    client: EngineClient,
    left: Iterator[tuple[int, GenerationRequest]],
    events: asyncio.Queue[Event],
    began: float,
) -> None:
    """Takes one request after the other."""
    for index, request in left:
        try:
            async with contextlib.aclosing(_run(client, request, began)) as stream:
                async for event in stream:
                    await events.put((index, event))
        except Exception as error:
            await events.put((index, _failed(request, error)))


async def _run(client: EngineClient, request: GenerationRequest, began: float) -> AsyncGenerator[GenerationEvent, None]:
    """One request, submitted again for as long as the queue is full and its own time allows."""
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
    return msgspec.structs.replace(request, **left) if left else request


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


def _failed(request: GenerationRequest, error: Exception) -> GenerationEvent:
    """The last event of a request that an exception has ended."""
    if isinstance(error, InvalidRequest):
        return GenerationEvent(
            request_id=request.id, finish_reason=FinishReason.ERROR, error=error.message, error_field=error.field
        )
    if isinstance(error, EngineClosed):
        return GenerationEvent(request_id=request.id, finish_reason=FinishReason.CANCELLED)
    message = fault_of(error).message
    return GenerationEvent(request_id=request.id, finish_reason=FinishReason.ERROR, error=message)
