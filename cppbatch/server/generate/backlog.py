"""Runs many requests through an engine whose queue is shorter than they are many, and loses none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from time import perf_counter

from cppbatch.cluster.engine_client import EngineClient
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest
from cppbatch.errors import EngineClosed, InvalidRequest
from cppbatch.server.errors import fault_of
from cppbatch.server.patience import enough, submit_patiently
from cppbatch.server.run import Event

_EVENTS_AHEAD = 2  # of each request, that a slow reader has not taken yet; then they wait


async def run_backlog(client: EngineClient, requests: list[GenerationRequest]) -> AsyncGenerator[Event, None]:
    """Runs the requests, in their order, and yields (index, event) as events come; closing it cancels all of them.

    Only as many are given to the engine at once as keep it busy: others' requests get in between, and the queue has
    room for them. Time spent here counts as time in the queue. One that cannot run ends with an event that says why.
    """
    at_once = min(len(requests), await enough(client))
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


async def _lane(
    client: EngineClient,
    left: Iterator[tuple[int, GenerationRequest]],
    events: asyncio.Queue[Event],
    began: float,
) -> None:
    """Takes one request after the other."""
    for index, request in left:
        try:
            async with contextlib.aclosing(submit_patiently(client, request, began)) as stream:
                async for event in stream:
                    await events.put((index, event))
        except Exception as error:
            await events.put((index, _failed(request, error)))


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
