"""From one HTTP request to the engine's requests and their merged events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from cppbatch.cluster.client import EngineClient
from cppbatch.engine.collect import expand as expand_params
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationEvent, GenerationRequest
from cppbatch.errors import InvalidRequest

_MOST_SEQUENCES = 1024

_EVENTS_AHEAD = 2  # of each request, that a slow reader has not taken yet; then its requests wait

Event = tuple[int, GenerationEvent]


def expand(
    name: str, prompts: list[str | list[int]], params: SamplingParams, n: int, options: dict[str, Any], *, ranked: bool
) -> list[GenerationRequest]:
    """A request for each prompt and each of its `n` completions, in that order.

    `options`: other fields of `GenerationRequest`, for all. `ranked`: with the log-probabilities by which the
    completions will be. Raises `InvalidRequest` when there are too many.
    """
    if len(prompts) * n > _MOST_SEQUENCES:
        message = f"asks for {len(prompts)} prompts x {n} completions; one request may have {_MOST_SEQUENCES}"
        raise InvalidRequest("prompt", message)
    return [
        GenerationRequest(id=f"{name}-{p * n + i}", prompt=prompt, params=its, **options)
        for p, prompt in enumerate(prompts)
        for i, its in enumerate(expand_params([params], n, ranked=ranked))
    ]


async def run(client: EngineClient, requests: list[GenerationRequest]) -> AsyncGenerator[Event, None]:
    """Runs the requests at once and yields (index, event) as events come; closing it cancels all of them.

    Nothing starts before every prompt is known to be good, so that an answer is refused whole or not at all. When one
    of them raises all the same, the others are cancelled and the exception is raised here.
    """
    if len(requests) == 1:
        async with contextlib.aclosing(client.submit(requests[0])) as stream:
            async for event in stream:
                yield 0, event
        return
    for request in {id(request.prompt): request for request in requests}.values():  # choices share their prompt
        await client.check(request)
    async with contextlib.aclosing(_merged(client, requests)) as merged:
        async for item in merged:
            yield item


async def _merged(client: EngineClient, requests: list[GenerationRequest]) -> AsyncGenerator[Event, None]:
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(_EVENTS_AHEAD * len(requests))

    async def pump(index: int, request: GenerationRequest) -> None:
        try:
            async with contextlib.aclosing(client.submit(request)) as stream:
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
