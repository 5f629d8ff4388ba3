"""A supervisor never gives a model up."""

from __future__ import annotations

import asyncio

from cppbatch import EngineConfig, EngineProcess, GenerationRequest
from tests.fake_workers import FakeWorker, fake_workers

__all__ = ["fake_workers"]


async def test_a_model_that_cannot_be_loaded_for_hours_is_tried_again(fake_workers: list[FakeWorker]) -> None:
    """A thousand attempts take 8 hours with the pauses between them."""
    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        engine._supervisor._failures = 2000
        fake_workers[0].die()
        for _ in range(500):
            if len(fake_workers) == 2 and engine.health().status == "ok":
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"it is {engine.health()}")


async def test_a_worker_without_requests_closes_its_engine_and_one_with_requests_is_killed(
    fake_workers: list[FakeWorker],
) -> None:
    async with EngineProcess(EngineConfig("model.gguf")):
        pass
    assert fake_workers[0].stopped
    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        reading = asyncio.ensure_future(anext(engine.submit(GenerationRequest(id="1", prompt="a"))))
        await asyncio.sleep(0)
    assert not fake_workers[1].stopped
    assert fake_workers[1].ended
    assert (await reading).finish_reason == "cancelled"
