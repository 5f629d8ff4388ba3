"""llama-server's `t_max_predict_ms`: a time after which a text ends with its next line."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from time import perf_counter

import msgspec

from cppbatch.cluster.engine_client import EngineClient
from cppbatch.engine.request import FinishReason, GenerationRequest
from cppbatch.server.run_requests import Event, run_requests


async def run_with_time_limit(
    client: EngineClient, requests: list[GenerationRequest], seconds: float
) -> AsyncGenerator[Event, None]:
    """As `run_requests`, but ends each text at the first new line that comes later than `seconds` after its first
    token."""
    first_token_at: dict[int, float] = {}
    out_of_time: set[int] = set()  # requests that were cancelled here
    async with contextlib.aclosing(run_requests(client, requests, check_first=True)) as events:
        async for index, event in events:
            if index in out_of_time and event.finish_reason is FinishReason.CANCELLED:
                yield index, msgspec.structs.replace(event, finish_reason=FinishReason.TIMEOUT)
                continue
            yield index, event
            now = perf_counter()
            is_late = now - first_token_at.setdefault(index, now) > seconds
            if is_late and "\n" in event.text and not event.finish_reason and index not in out_of_time:
                out_of_time.add(index)
                await client.cancel(requests[index].id)
