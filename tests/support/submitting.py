"""Requests to an asyncio engine, and all of their events."""

from __future__ import annotations

import asyncio

from cppbatch import FinishReason, GenerationEvent, GenerationRequest
from cppbatch.cluster.engines.client import EngineClient


async def run(engine: EngineClient, its: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in engine.submit(its)]


async def together(engine: EngineClient, requests: list[GenerationRequest]) -> list[list[GenerationEvent]]:
    return await asyncio.wait_for(asyncio.gather(*(run(engine, its) for its in requests)), 120)


async def started(engine: EngineClient, its: GenerationRequest) -> asyncio.Task[list[GenerationEvent]]:
    """A task that collects a request's events, once the first one is there."""
    first = asyncio.Event()

    async def collect() -> list[GenerationEvent]:
        events = []
        async for event in engine.submit(its):
            events.append(event)
            first.set()
        return events

    task = asyncio.create_task(collect())
    task.add_done_callback(lambda _: first.set())
    await asyncio.wait_for(first.wait(), 60)
    return task


class Reader:
    """Reads the events of a request as they come."""

    def __init__(self, engine: EngineClient, asked: GenerationRequest) -> None:
        self.asked = asked
        self.events: list[GenerationEvent] = []
        self.task = asyncio.create_task(self._read(engine))

    async def _read(self, engine: EngineClient) -> None:
        async for event in engine.submit(self.asked):
            assert event.request_id == self.asked.id
            self.events.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish_reason(self) -> FinishReason | None:
        reasons = [event.finish_reason for event in self.events if event.finish_reason]
        assert len(reasons) <= 1, "exactly one last event"
        return reasons[0] if reasons else None


def assert_ends_once(events: list[GenerationEvent], reason: FinishReason, n_tokens: int | None = None) -> None:
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [reason]
    assert n_tokens is None or sum(len(event.tokens) for event in events) == n_tokens
