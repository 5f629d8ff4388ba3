"""Runs the engine's requests of one HTTP request and merges their events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from time import perf_counter

from cppbatch.cluster.engine_client import EngineClient
from cppbatch.engine.request import GenerationEvent, GenerationRequest, is_long
from cppbatch.server.patience import enough, submit_patiently

_EVENTS_AHEAD = 2  # of each request, that a slow reader has not taken yet; then its requests wait

Event = tuple[int, GenerationEvent]


Submit = Callable[[GenerationRequest], AsyncGenerator[GenerationEvent, None]]


async def run(
    client: EngineClient, requests: list[GenerationRequest], *, check: bool = True
) -> AsyncGenerator[Event, None]:
    """Runs the requests and yields (index, event) as events come; closing it cancels all of them.

    Only as many are given to the engine at once as keep it busy, so that others' requests get in between; time spent
    here counts as time in the queue. The first one is refused when the queue is full, the others then wait.

    `check`: nothing starts before every prompt is known to be good, so that a stream is refused whole or not at all.
    Long prompts are always checked first: a copy of them goes to the engine with each request.
    When one of them raises all the same, the others are cancelled and the exception is raised here.
    """
    if len(requests) > 1:
        for request in {id(request.prompt): request for request in requests}.values():  # choices share their prompt
            if check or is_long(request.prompt):
                await client.check(request)
    at_once, began = len(requests), perf_counter()
    if at_once > client.config.n_parallel:  # else nobody need be asked
        at_once = await enough(client)

    def submit(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        if len(requests) <= at_once or request is requests[0]:
            return client.submit(request)
        return submit_patiently(client, request, began)

    async with contextlib.aclosing(merge(submit, requests, at_once)) as merged:
        async for item in merged:
            yield item


async def merge(
    submit: Submit, requests: list[GenerationRequest], at_once: int | None = None
) -> AsyncGenerator[Event, None]:
    """`run`, in whichever way requests are submitted, `at_once` of them at once; None: all."""
    if len(requests) == 1:
        async with contextlib.aclosing(submit(requests[0])) as stream:
            async for event in stream:
                yield 0, event
        return
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(_EVENTS_AHEAD * len(requests))

    places = asyncio.Semaphore(at_once or len(requests))

    async def pump(index: int, request: GenerationRequest) -> None:
        try:
            async with places, contextlib.aclosing(submit(request)) as stream:
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
