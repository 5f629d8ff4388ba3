"""A slow reader gets everything, in fewer pieces."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cppbatch import FinishReason, GenerationEvent, TokenLogprob
from cppbatch.cluster.output_collector import OutputCollector


def event(i: int, **fields: Any) -> GenerationEvent:
    logprob = TokenLogprob(token=i, piece=b"x", logprob=-1.0)
    return GenerationEvent(request_id="a", text=f"{i} ", tokens=[i, i + 1000], logprobs=[logprob], **fields)


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_or_told_twice(seed: int) -> None:
    chance = random.Random(seed)
    mailbox, n = OutputCollector(), 50

    async def read() -> list[GenerationEvent]:
        events = []
        while not events or events[-1].finish_reason is None:
            events.append(await mailbox.get())
            for _ in range(chance.randint(0, 5)):
                await asyncio.sleep(0)
        return events

    reading = asyncio.ensure_future(read())
    for i in range(n):
        mailbox.put(event(i, finish_reason=FinishReason.STOP, seed=7) if i == n - 1 else event(i))
        if chance.random() < 0.7:
            await asyncio.sleep(0)
    events = await asyncio.wait_for(reading, 5)
    assert "".join(each.text for each in events) == "".join(f"{i} " for i in range(n))
    assert [token for each in events for token in each.tokens] == [t for i in range(n) for t in (i, i + 1000)]
    assert [entry.token for each in events for entry in each.logprobs] == list(range(n))
    assert events[-1].seed == 7
    assert len(events) < n, "it was never slow"


async def test_a_fast_reader_gets_the_events_themselves() -> None:
    mailbox = OutputCollector()
    for i in range(3):
        mailbox.put(sent := event(i))
        assert await mailbox.get() is sent


async def test_a_failure_is_raised_at_once() -> None:
    mailbox = OutputCollector()
    mailbox.put(event(0))
    mailbox.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await mailbox.get()
