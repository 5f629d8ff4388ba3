"""From one HTTP request to the engine's requests and their merged events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec

from cppbatch.cluster.client import EngineClient
from cppbatch.engine.request import GenerationEvent, GenerationRequest, SamplingParams

Event = tuple[int, GenerationEvent]


def expand(name: str, prompts: list[str | list[int]], params: SamplingParams, n: int) -> list[GenerationRequest]:
    """A request for each prompt and each of its `n` choices, in the order of the answer's choices.

    Choices with a given seed count up from it, so that they differ and can be had again.
    """

    def seeded(choice: int) -> SamplingParams:
        return params if params.seed in (None, -1) else msgspec.structs.replace(params, seed=params.seed + choice)

    return [
        GenerationRequest(id=f"{name}-{p * n + choice}", prompt=prompt, params=seeded(choice))
        for p, prompt in enumerate(prompts)
        for choice in range(n)
    ]


async def run(client: EngineClient, requests: list[GenerationRequest]) -> AsyncGenerator[Event, None]:
    """Runs the requests at once and yields (index, event) as events come; closing it cancels all of them.

    When one of them raises, the others are cancelled and the exception is raised here.
    """
    events: asyncio.Queue[Event | Exception] = asyncio.Queue()

    async def pump(index: int, request: GenerationRequest) -> None:
        try:
            async with contextlib.aclosing(client.submit(request)) as stream:
                async for event in stream:
                    events.put_nowait((index, event))
        except Exception as error:
            events.put_nowait(error)

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
