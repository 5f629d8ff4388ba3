"""llama-server's `t_max_predict_ms`: a time after which a text ends with its next line."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from time import perf_counter

import msgspec

from cppbatch.cluster.engine_client import EngineClient
from cppbatch.engine.request import FinishReason, GenerationRequest
from cppbatch.server.respond import Runner
from cppbatch.server.run import Event, run


def run_for(seconds: float) -> Runner:
    """A runner as `run`, that ends a text with the first new line so many seconds after its first token."""

    async def limited(client: EngineClient, requests: list[GenerationRequest]) -> AsyncGenerator[Event, None]:
        began: dict[int, float] = {}  # when each had its first token
        ended: set[int] = set()  # those that have had their time
        async with contextlib.aclosing(run(client, requests)) as events:
            async for index, event in events:
                if index in ended and event.finish_reason is FinishReason.CANCELLED:
                    yield index, msgspec.structs.replace(event, finish_reason=FinishReason.TIMEOUT)
                    continue
                yield index, event
                now = perf_counter()
                is_over = now - began.setdefault(index, now) > seconds
                if is_over and "\n" in event.text and not event.finish_reason and index not in ended:
                    ended.add(index)
                    await client.cancel(requests[index].id)

    return limited
