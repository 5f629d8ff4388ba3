"""A slow reader gets everything, in fewer pieces."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cppbatch import FinishReason, GenerationEvent, TokenLogprob
from cppbatch.cluster.engines.output_collector import OutputCollector


def event(i: int, **fields: Any) -> GenerationEvent:
    logprob = TokenLogprob(token=i, piece=b"x", logprob=-1.0)
    return GenerationEvent(
        request_id="a", text=f"{i} ", tokens=[i, i + 1000], token_texts=[str(i), " "], logprobs=[logprob], **fields
    )


@pytest.mark.parametrize("seed", range(20))
async def test_no_event_is_lost_or_returned_twice(seed: int) -> None:
    chance = random.Random(seed)
    collector, n = OutputCollector("a"), 50

    async def read() -> list[GenerationEvent]:
        events: list[GenerationEvent] = []
        while not events or events[-1].finish_reason is None:
            events.append(await collector.get())
            for _ in range(chance.randint(0, 5)):
                await asyncio.sleep(0)
        return events

    reading = asyncio.ensure_future(read())
    for i in range(n):
        collector.put(event(i, finish_reason=FinishReason.STOP, seed=7) if i == n - 1 else event(i))
        if chance.random() < 0.7:
            await asyncio.sleep(0)
    events = await asyncio.wait_for(reading, 5)
    assert "".join(each.text for each in events) == "".join(f"{i} " for i in range(n))
    assert [token for each in events for token in each.tokens] == [t for i in range(n) for t in (i, i + 1000)]
    assert [text for each in events for text in each.token_texts] == [t for i in range(n) for t in (str(i), " ")]
    assert [entry.token for each in events for entry in each.logprobs] == list(range(n))
    assert events[-1].seed == 7
    assert len(events) < n, "no events were merged"


async def test_a_fast_reader_gets_the_events_themselves() -> None:
    collector = OutputCollector("a")
    for i in range(3):
        collector.put(sent := event(i))
        assert await collector.get() is sent


async def test_a_failure_is_raised_at_once() -> None:
    collector = OutputCollector("a")
    collector.put(event(0))
    collector.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await collector.get()


async def test_events_get_the_clients_id_and_the_last_one_finishes() -> None:
    collector = OutputCollector("client")
    for events in ([event(0)], [event(1), event(2)], [event(3, finish_reason=FinishReason.LENGTH)]):
        assert not collector.finished
        for each in events:
            collector.put(each)
        assert (await collector.get()).request_id == "client"
    assert collector.finished
