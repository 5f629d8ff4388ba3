"""An idle worker ends and the next request starts another one: when, and when not. No process is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines import supervisor
from cppbatch.cluster.engines.in_flight import InFlightRequest, InFlightRequests
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.cluster.engines.supervisor import Supervisor
from cppbatch.cluster.link import FromWorker, Loaded
from cppbatch.cluster.worker.handle import WorkerDied
from cppbatch.config import EngineConfig
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import ConfigError
from tests.support.fakes import fake_engine

IDLE_SECONDS = 0.05
SOON = 5.0


class Worker:
    """Is loaded at once, says nothing more, and lives until it is ended or `die` is set."""

    started: list[Worker]
    loaded: Loaded

    def __init__(self) -> None:
        self.die = asyncio.Event()
        self.stopped = self.ended = False
        self._n_received = 0

    @classmethod
    async def start(cls, config: EngineConfig, runtime: str | None) -> Worker:
        cls.started.append(cls())
        return cls.started[-1]

    async def receive(self) -> FromWorker:
        self._n_received += 1
        if self._n_received > 1:
            await asyncio.Event().wait()
        return self.loaded

    async def while_alive(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self.die.wait())
        await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
        for task in (working, dying):
            task.cancel()
        if dying.done() and not dying.cancelled():
            raise WorkerDied("killed", set())
        return working.result()

    async def stop(self) -> bool:
        self.stopped = True
        return True

    async def end(self) -> None:
        self.ended = True


class Listener:
    """Has requests; records the supervisor's calls."""

    def __init__(self) -> None:
        self.requests = InFlightRequests(InFlightRequest)
        self.n_ready = self.n_died = 0
        self.at_sleep: asyncio.Event | None = None  # `before_sleep` waits for it

    @property
    def idle_seconds(self) -> float:
        return self.requests.idle_seconds

    async def before_sleep(self) -> None:
        if self.at_sleep:
            await self.at_sleep.wait()

    def on_worker_ready(self, stats: object) -> None:
        self.n_ready += 1

    def on_worker_message(self, message: FromWorker) -> None:
        raise AssertionError(message)

    def on_worker_died(self, active: set[int], give_up: str | None) -> None:
        self.n_died += 1


class Run:
    """A supervisor that runs, its listener, and the workers that it started."""

    def __init__(self, sleep_idle_seconds: float = IDLE_SECONDS) -> None:
        self.listener = Listener()
        config = EngineConfig(model_path="")
        self.supervisor = Supervisor(config, self.listener, step_timeout=9, sleep_idle_seconds=sleep_idle_seconds)
        self.task = asyncio.ensure_future(self.supervisor.run())

    @property
    def status(self) -> str:
        return self.supervisor.health.status

    def add_request(self) -> Any:
        request = self.listener.requests.add(GenerationRequest(id="a", prompt="a"))
        self.supervisor.wake()
        return request


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    with fake_engine() as engine:
        Worker.loaded = Loaded(engine.info, engine.stats())
    Worker.started = []
    monkeypatch.setattr(supervisor, "WorkerHandle", Worker)
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.001)
    return Worker.started


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    its = Run()
    yield its
    its.task.cancel()


async def until(condition: Any) -> None:
    for _ in range(int(SOON / 0.001)):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition did not become true")


async def test_an_idle_worker_ends_and_the_next_request_starts_another(run: Run, workers: list[Worker]) -> None:
    await until(lambda: run.status == "sleeping" and workers[0].ended)
    assert workers[0].stopped, "its engine had time to write what it keeps"
    await asyncio.sleep(2 * IDLE_SECONDS)
    assert len(workers) == 1, "nothing wakes it without a request"
    assert run.supervisor.worker is None
    run.add_request()
    await until(lambda: run.status == "ok")
    assert (len(workers), run.listener.n_ready) == (2, 2)
    assert (run.supervisor.restarts, run.listener.n_died) == (0, 0), "it was no crash"


async def test_a_worker_with_a_request_stays_and_is_idle_from_its_end_on(run: Run, workers: list[Worker]) -> None:
    request = run.add_request()
    await asyncio.sleep(4 * IDLE_SECONDS)
    assert run.status == "ok"
    ended = asyncio.get_running_loop().time()
    run.listener.requests.remove(request)
    await until(lambda: run.status == "sleeping")
    assert asyncio.get_running_loop().time() - ended >= IDLE_SECONDS * 0.99


async def test_a_request_while_it_falls_asleep_keeps_the_worker(run: Run, workers: list[Worker]) -> None:
    run.listener.at_sleep = asyncio.Event()
    await asyncio.sleep(3 * IDLE_SECONDS)
    run.add_request()
    run.listener.at_sleep.set()
    await asyncio.sleep(2 * IDLE_SECONDS)
    assert (run.status, len(workers)) == ("ok", 1)
    assert run.supervisor.worker is not None


async def test_a_request_of_the_same_moment_as_the_sleep_wakes_it(run: Run, workers: list[Worker]) -> None:
    await until(lambda: run.status == "sleeping")
    run.add_request()  # the worker may not have ended yet
    await until(lambda: run.status == "ok")
    assert len(workers) == 2


async def test_a_worker_that_dies_idle_is_replaced_and_the_next_one_sleeps(run: Run, workers: list[Worker]) -> None:
    await until(lambda: run.status == "ok")
    workers[0].die.set()
    await until(lambda: run.status == "sleeping" and len(workers) == 2)
    assert (run.supervisor.restarts, run.listener.n_died) == (1, 1)


async def test_without_the_setting_no_worker_sleeps(workers: list[Worker]) -> None:
    run = Run(-1)
    await asyncio.sleep(4 * IDLE_SECONDS)
    assert run.status == "ok"
    run.task.cancel()


@pytest.mark.parametrize(
    "wrong", [{"sleep_idle_seconds": 0}, {"sleep_idle_seconds": -2}, {"sleep_idle_seconds": 5, "in_process": True}]
)
def test_an_invalid_time_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--sleep-idle-seconds"):
        Deployment(**wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sleep_idle_seconds", 0),
        ("sleep_idle_seconds", float("nan")),
        ("step_timeout", 0),
        ("step_timeout", float("nan")),
    ],
)
async def test_an_engine_process_refuses_the_same_times(workers: list[Worker], name: str, wrong: float) -> None:
    times: dict[str, Any] = {name: wrong}
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} is"):
        Deployment(**times)
    with pytest.raises(ConfigError, match=f"^{name} is"):
        EngineProcess("tiny.gguf", **times)
    assert not workers


async def test_a_client_says_once_how_long_an_idle_worker_stays(workers: list[Worker]) -> None:
    its = Run(sleep_idle_seconds=-1)
    try:
        await until(lambda: its.status == "ok")
        assert its.supervisor.seconds_left is None, "never"
        request = its.add_request()
        its.supervisor.sleep_after(60)
        assert its.supervisor.seconds_left == 60, "from the end of the request"
        its.supervisor.sleep_after(0)
        await asyncio.sleep(3 * IDLE_SECONDS)
        assert its.status == "ok", "it has a request"
        its.listener.requests.remove(request)
        await until(lambda: its.status == "sleeping")
        assert its.supervisor.seconds_left is None, "it has stopped"
        its.listener.requests.remove(its.add_request())
        await until(lambda: its.status == "ok")
        await asyncio.sleep(supervisor._LEAST_IDLE_S + 2 * IDLE_SECONDS)
        assert its.status == "ok", "from then on it stays as it was started to"
        its.supervisor.sleep_after(IDLE_SECONDS)
        its.supervisor.sleep_after(None)
        await asyncio.sleep(supervisor._LEAST_IDLE_S + 2 * IDLE_SECONDS)
        assert its.status == "ok"
    finally:
        its.task.cancel()
