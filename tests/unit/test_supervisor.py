"""A supervisor never gives a model up."""

from __future__ import annotations

import asyncio

from cppbatch import EngineConfig, EngineProcess
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
