"""An idle worker ends and the next request starts another one: when, and when not. No process is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines import supervisor
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import ConfigError
from tests.support.fake_workers import FakeWorker, fake_workers
from tests.support.listening import until

__all__ = ["fake_workers"]

IDLE_SECONDS = 0.05
REQUEST = GenerationRequest(id="a", prompt="a", params=SamplingParams(max_tokens=1))


@pytest.fixture
async def engine(fake_workers: list[FakeWorker]) -> AsyncIterator[EngineProcess]:
    async with EngineProcess(EngineConfig("model.gguf"), sleep_idle_seconds=IDLE_SECONDS) as engine:
        yield engine


def status(engine: EngineProcess) -> str:
    return engine.health().status


async def is_asleep(engine: EngineProcess) -> None:
    await until(lambda: status(engine) == "sleeping" and FakeWorker.started[-1].ended, 5)


async def is_awake(engine: EngineProcess) -> None:
    await until(lambda: status(engine) == "ok", 5)


async def test_an_idle_worker_ends_and_the_next_request_starts_another(
    engine: EngineProcess, fake_workers: list[FakeWorker]
) -> None:
    await is_asleep(engine)
    assert fake_workers[0].stopped, "its engine had time to write what it keeps"
    await asyncio.sleep(2 * IDLE_SECONDS)
    assert len(fake_workers) == 1, "nothing wakes it without a request"
    assert engine._supervisor.worker is None
    with engine.open(REQUEST):
        await is_awake(engine)
    assert len(fake_workers) == 2
    assert not fake_workers[0].died
    assert engine._supervisor.restarts == 0, "it was no crash"


async def test_a_worker_with_a_request_stays_and_is_idle_from_its_end_on(engine: EngineProcess) -> None:
    with engine.open(REQUEST):
        await asyncio.sleep(4 * IDLE_SECONDS)
        assert status(engine) == "ok"
        ended = asyncio.get_running_loop().time()
    await is_asleep(engine)
    assert asyncio.get_running_loop().time() - ended >= IDLE_SECONDS * 0.99


async def test_a_request_while_it_falls_asleep_keeps_the_worker(
    engine: EngineProcess, fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_sleep = asyncio.Event()
    monkeypatch.setattr(engine, "before_sleep", at_sleep.wait)
    await asyncio.sleep(3 * IDLE_SECONDS)
    with engine.open(REQUEST):
        at_sleep.set()
        await asyncio.sleep(2 * IDLE_SECONDS)
        assert (status(engine), len(fake_workers)) == ("ok", 1)
        assert engine._supervisor.worker is not None


async def test_a_request_of_the_same_moment_as_the_sleep_wakes_it(
    engine: EngineProcess, fake_workers: list[FakeWorker]
) -> None:
    await until(lambda: status(engine) == "sleeping", 5)
    with engine.open(REQUEST):  # the worker may not have ended yet
        await is_awake(engine)
    assert len(fake_workers) == 2


async def test_a_worker_that_dies_idle_is_replaced_and_the_next_one_sleeps(
    engine: EngineProcess, fake_workers: list[FakeWorker]
) -> None:
    fake_workers[0].die()
    await until(lambda: status(engine) == "sleeping" and len(fake_workers) == 2, 5)
    assert engine._supervisor.restarts == 1


async def test_without_the_setting_no_worker_sleeps(fake_workers: list[FakeWorker]) -> None:
    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        await asyncio.sleep(4 * IDLE_SECONDS)
        assert status(engine) == "ok"


@pytest.mark.parametrize(
    "wrong", [{"sleep_idle_seconds": 0}, {"sleep_idle_seconds": -2}, {"sleep_idle_seconds": 5, "in_process": True}]
)
def test_an_invalid_time_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--sleep-idle-seconds"):
        Deployment(**wrong)


@pytest.mark.parametrize("name", ["sleep_idle_seconds", "step_timeout"])
@pytest.mark.parametrize("wrong", [0, float("nan")])
async def test_an_engine_process_refuses_the_same_times(
    fake_workers: list[FakeWorker], name: str, wrong: float
) -> None:
    times: dict[str, Any] = {name: wrong}
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} is"):
        Deployment(**times)
    with pytest.raises(ConfigError, match=f"^{name} is"):
        EngineProcess("tiny.gguf", **times)
    assert not fake_workers


async def test_a_client_says_once_how_long_an_idle_worker_stays(fake_workers: list[FakeWorker]) -> None:
    async with EngineProcess(EngineConfig("model.gguf")) as engine:
        assert engine.seconds_left is None, "never"
        with engine.open(REQUEST):
            engine.sleep_after(60)
            assert engine.seconds_left == 60, "from the end of the request"
            engine.sleep_after(0)
            await asyncio.sleep(3 * IDLE_SECONDS)
            assert status(engine) == "ok", "it has a request"
        await is_asleep(engine)
        assert engine.seconds_left is None, "it has stopped"
        with engine.open(REQUEST):
            await is_awake(engine)
        await asyncio.sleep(supervisor._LEAST_IDLE_S + 2 * IDLE_SECONDS)
        assert status(engine) == "ok", "from then on it stays as it was started to"
        engine.sleep_after(IDLE_SECONDS)
        engine.sleep_after(None)
        await asyncio.sleep(supervisor._LEAST_IDLE_S + 2 * IDLE_SECONDS)
        assert status(engine) == "ok"
