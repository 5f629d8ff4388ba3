"""A supervisor never gives up on a model that has computed anything."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from cppbatch import EngineConfig, EngineProcess, GenerationRequest, SamplingParams
from cppbatch.cluster.link import Loaded
from cppbatch.cluster.worker.handle import WorkerDied
from cppbatch.errors import EngineClosed
from tests.support.fake_workers import FakeWorker, fake_workers
from tests.support.listening import until

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


ABORT = "killed by SIGABRT: ggml.c:1797: GGML_ASSERT(view_src == NULL) failed"


async def die_in_a_row(workers: list[FakeWorker], deaths: list[WorkerDied]) -> None:
    """Each worker dies as soon as it is ready."""
    for i, death in enumerate(deaths):
        await until_ready(workers, i)
        workers[i].die(death)


async def until_ready(workers: list[FakeWorker], i: int) -> None:
    await until(lambda: len(workers) > i and workers[i].is_listened_to)


async def test_the_fifth_death_in_the_first_steps_names_the_model_and_starts_no_other_worker(
    fake_workers: list[FakeWorker],
) -> None:
    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        reading = asyncio.ensure_future(anext(engine.submit(GenerationRequest(id="1", prompt="a"))))
        await die_in_a_row(fake_workers, [WorkerDied(ABORT, set()) for _ in range(5)])
        error = (await reading).error or ""
        assert f"the model {engine.info.name} ({engine.info.description}) cannot be computed here" in error
        assert f"before computing a token; the last one: {ABORT}" in error
        health = engine.health()
        assert (health.status, health.takes_requests) == ("failed", False)
        assert health.error
        assert health.error in error
        with pytest.raises(EngineClosed, match=r"it is failed: the model .* cannot be computed here"):
            await engine.check(GenerationRequest(id="2", prompt="a"))
        await asyncio.sleep(0.1)
        assert len(fake_workers) == 5


@pytest.mark.parametrize(
    "death",
    [WorkerDied("killed by SIGKILL", set(), external=True), WorkerDied(ABORT, set(), computing=False)],
    ids=["from outside", "while a request was prepared"],
)
async def test_other_deaths_do_not_count_against_the_model(fake_workers: list[FakeWorker], death: WorkerDied) -> None:
    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        await die_in_a_row(fake_workers, [death] * 8)
        await until(lambda: len(fake_workers) == 9 and engine.health().status == "ok")


async def test_a_model_that_has_computed_a_token_is_not_to_blame(
    fake_workers: list[FakeWorker],
) -> None:
    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        await die_in_a_row(fake_workers, [WorkerDied(ABORT, set()) for _ in range(4)])
        await until_ready(fake_workers, 4)
        request = GenerationRequest(id="1", prompt="a", params=SamplingParams(max_tokens=1))
        reading = asyncio.ensure_future(anext(engine.submit(request)))
        await asyncio.sleep(0)
        fake_workers[4].step()
        assert (await reading).tokens
        for _ in range(6):
            n = len(fake_workers)
            fake_workers[-1].die(WorkerDied(ABORT, set()))
            await until_ready(fake_workers, n)


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
        assert "model.gguf is now a different model (llama 7B" in event.error
        assert engine.health().status == "failed"
        with pytest.raises(EngineClosed, match="it is failed"):
            await engine.check(request)
        monkeypatch.setattr(FakeWorker, "start", start)
        for _ in range(500):
            if engine.health().status == "ok":
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"it is {engine.health()}")


async def test_a_caller_of_stats_that_is_cancelled_when_the_answer_arrives_ends(fake_workers: list[FakeWorker]) -> None:
    """At any iteration of the event loop. Otherwise a cancelled monitor would run forever."""
    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        await engine.loaded()
        for n_turns in range(30):
            asking = asyncio.ensure_future(engine.stats())
            for _ in range(n_turns):
                await asyncio.sleep(0)
            if asking.cancel():
                await asyncio.wait([asking])
                assert asking.cancelled(), f"cancelled after {n_turns} turns"
