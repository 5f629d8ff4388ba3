"""Requests at random moments around the one at which a worker falls asleep: every stream is whole. No process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from cppbatch import EngineConfig, EngineProcess, GenerationRequest, SamplingParams
from cppbatch.cluster.engines.autoscaled import AutoscaledGroup
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.cluster.link import GetStats, ToWorker
from cppbatch.cluster.rules import ScalingRule
from cppbatch.engine.request import FinishReason
from tests.support.fake_workers import FakeWorker, fake_workers, text_of
from tests.support.randomised import cases

__all__ = ["fake_workers"]

IDLE_SECONDS = 0.01
JITTER = 0.002  # the moment of a request, around that of falling asleep
SOON = 200.0  # 3,000 requests take 5 s of the CPU
REQUESTS = 50  # of a client


@pytest.fixture
async def stepping(fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[random.Random]:
    """Workers step by themselves, and load, report and end in a random time."""
    chosen = random.Random(1)
    start, stop = FakeWorker.start.__func__, FakeWorker.stop  # type: ignore[attr-defined]
    send = FakeWorker.send

    async def slow_start(cls: type[FakeWorker], config: EngineConfig, runtime: str | None) -> FakeWorker:
        worker: FakeWorker = await start(cls, config, runtime)
        await asyncio.sleep(chosen.choice((0, 0, JITTER)))
        return worker

    async def slow_stop(self: FakeWorker) -> bool:
        await asyncio.sleep(chosen.choice((0, 0, JITTER)))
        return await stop(self)

    def slow_answer(self: FakeWorker, message: ToWorker) -> None:
        if isinstance(message, GetStats):  # asked before it falls asleep: a request may come meanwhile
            asyncio.get_running_loop().call_later(chosen.choice((0, JITTER)), send, self, message)
        else:
            send(self, message)

    monkeypatch.setattr(FakeWorker, "send", slow_answer)
    monkeypatch.setattr(FakeWorker, "start", classmethod(slow_start))
    monkeypatch.setattr(FakeWorker, "stop", slow_stop)

    async def step() -> None:
        while True:
            for worker in fake_workers:
                if worker.sequences and not worker.ended:
                    worker.step()
            await asyncio.sleep(JITTER / 4)

    task = asyncio.ensure_future(step())
    yield chosen
    task.cancel()


async def ask(engine: EngineClient, chosen: random.Random, number: int) -> None:
    """Says a stream is whole: all its tokens in order, and one end."""
    await asyncio.sleep(IDLE_SECONDS + chosen.uniform(-JITTER, JITTER))
    n = chosen.randint(1, 5)
    request = GenerationRequest(id=str(number), prompt=f"p{number}", params=SamplingParams(max_tokens=n))
    if chosen.random() < 0.1:
        await engine.check(request)
        return
    events = [event async for event in engine.submit(request)]
    assert "".join(event.text for event in events) == text_of(request.prompt, n)
    assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.LENGTH]


async def look(engine: EngineClient, chosen: random.Random) -> None:
    """What a monitor, a page and a scraper do: it wakes nothing."""
    while True:
        await asyncio.sleep(chosen.uniform(0, IDLE_SECONDS))
        engine.health()
        await engine.stats()
        await engine.workers()
        await engine.live()


async def run_client(engine: EngineClient, chosen: random.Random) -> None:
    await engine.loaded()
    looking = asyncio.ensure_future(look(engine, chosen))
    try:
        for number in range(REQUESTS):
            await ask(engine, chosen, number)
        for _ in range(500):
            if engine.health().status == "sleeping":
                break
            await asyncio.sleep(IDLE_SECONDS)
        assert engine.health().status == "sleeping"
        await asyncio.sleep(3 * IDLE_SECONDS)
        assert engine.health().status == "sleeping", "what looks at it does not wake it"
        assert not looking.done()
    finally:
        looking.cancel()


@cases(ring=150, nightly=500, soak=3000)
async def test_requests_at_the_moment_of_falling_asleep(
    fake_workers: list[FakeWorker], stepping: random.Random, n_cases: int
) -> None:
    config = EngineConfig("model.gguf")
    engines = [EngineProcess(config, sleep_idle_seconds=IDLE_SECONDS) for _ in range(n_cases // REQUESTS)]
    await asyncio.wait_for(asyncio.gather(*(run_client(engine, stepping) for engine in engines)), SOON)
    slept = [worker for worker in fake_workers if worker.stopped]
    assert len(engines) < len(slept) < n_cases + len(engines), (
        "some requests came just before it slept, others just after"
    )
    assert len(slept) == len(fake_workers), "none was killed"
    assert sum(worker.cut_off for worker in fake_workers) == 0
    for engine in engines:
        assert (await engine.workers())[0].restarts == 0
        await engine.close()


async def test_requests_at_the_moment_at_which_each_of_several_workers_falls_asleep(
    fake_workers: list[FakeWorker], stepping: random.Random
) -> None:
    config = EngineConfig("model.gguf", n_parallel=2)
    groups = [
        EngineGroup([EngineProcess(config, name=str(i), sleep_idle_seconds=IDLE_SECONDS) for i in range(3)])
        for _ in range(4)
    ]
    await asyncio.wait_for(asyncio.gather(*(run_client(group, stepping) for group in groups)), SOON)
    assert sum(worker.cut_off for worker in fake_workers) == 0
    assert all(worker.stopped for worker in fake_workers)
    for group in groups:
        await group.close()


async def test_workers_that_start_and_end_sleep_too(fake_workers: list[FakeWorker], stepping: random.Random) -> None:
    config = EngineConfig("model.gguf", n_parallel=2)

    async def fits(number: int) -> str | None:
        return None

    def start(number: int) -> EngineProcess:
        return EngineProcess(config, name=str(number), sleep_idle_seconds=IDLE_SECONDS)

    rule = ScalingRule(min_workers=1, max_workers=3, n_parallel=2, downscale_delay=0.05)
    group = AutoscaledGroup(start, rule, shortage=fits, interval=0.01)
    await asyncio.wait_for(run_client(group, stepping), SOON)
    assert sum(worker.cut_off for worker in fake_workers) == 0
    assert all(worker.stopped for worker in fake_workers)
    await group.close()
