"""Runs the engine's requests of one HTTP request and merges their events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from cppbatch.cluster.client import EngineClient
from cppbatch.engine.request import GenerationEvent, GenerationRequest, is_long

_EVENTS_AHEAD = 2  # of each request, that a slow reader has not taken yet; then its requests wait

Event = tuple[int, GenerationEvent]


Submit = Callable[[GenerationRequest], AsyncGenerator[GenerationEvent, None]]


async def run(
    client: EngineClient, requests: list[GenerationRequest], *, check: bool = True
) -> AsyncGenerator[Event, None]:
    """Runs the requests at once and yields (index, event) as events come; closing it cancels all of them.

    `check`: nothing starts before every prompt is known to be good, so that a stream is refused whole or not at all.
    Long prompts are always checked first: a copy of them goes to the engine with each request.
    When one of them raises all the same, the others are cancelled and the exception is raised here.
    """
    if len(requests) > 1:
        for request in {id(request.prompt): request for request in requests}.values():  # choices share their prompt
            if check or is_long(request.prompt):
                await client.check(request)
    async with contextlib.aclosing(merge(client.submit, requests)) as merged:
        async for item in merged:
            yield item


async def merge(submit: Submit, requests: list[GenerationRequest]) -> AsyncGenerator[Event, None]:
    """`run`, in whichever way requests are submitted."""
    if len(requests) == 1:
        async with contextlib.aclosing(submit(requests[0])) as stream:
            async for event in stream:
                yield 0, event
        return
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(_EVENTS_AHEAD * len(requests))

    async def pump(index: int, request: GenerationRequest) -> None:
        try:
            async with contextlib.aclosing(submit(request)) as stream:
                async for event in stream:
                    await events.put((index, event))
        except Exception as error:
            await events.put(error)

    tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    left = len(tasks)
    try:
        while left:
            item = await events.get()
            if isinstance(item, Exception):
                raise item
            left -= item[1].finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
