"""A supervisor never gives a model up."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from cppbatch import EngineConfig, EngineProcess, GenerationRequest, SamplingParams
from cppbatch.cluster import supervisor
from cppbatch.cluster.worker_link import Loaded
from cppbatch.errors import EngineClosed
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


async def test_a_file_that_became_another_model_is_refused_until_it_is_back(
    fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chat template and the tokens so far are those of the model that was there at the start."""
    start = FakeWorker.start
    monkeypatch.setattr(supervisor, "_MAX_PAUSE_S", 0.01)

    async def start_another(config: EngineConfig, runtime: str | None) -> FakeWorker:
        worker = await start(config, runtime)
        loaded = await worker.receive()
        assert isinstance(loaded, Loaded)
        info = replace(loaded.info, chat_template="another", description="llama 7B")
        worker._messages.put_nowait(replace(loaded, info=info))
        return worker

    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        monkeypatch.setattr(FakeWorker, "start", start_another)
        fake_workers[0].die()
        request = GenerationRequest(id="1", prompt="a", params=SamplingParams(max_tokens=1))
        (event,) = [event async for event in engine.submit(request)]
        assert event.error is not None
        assert "model.gguf is another model now (llama 7B" in event.error
        assert engine.health().status == "failed"
        with pytest.raises(EngineClosed, match="it is failed"):
            await engine.check(request)
        monkeypatch.setattr(FakeWorker, "start", start)
        for _ in range(500):
            if engine.health().status == "ok":
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"it is {engine.health()}")
