"""Several workers: which one gets a request. No process is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cppbatch import EngineConfig, EngineProcess, GenerationRequest
from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines.client import EngineClient, Health
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.config import available_threads
from cppbatch.errors import ConfigError
from tests.support.fake_workers import FakeWorker, fake_workers
from tests.support.submitting import run

__all__ = ["fake_workers"]

LONG = "All of them begin with these words, which are worth reading only once. " * 40  # 2,800 letters


class Fleet:
    """Three workers in a group; each request runs until `finish`."""

    def __init__(self) -> None:
        config = EngineConfig("model.gguf", n_parallel=16)
        self.engines = [EngineProcess(config, name=str(i)) for i in range(3)]
        self.group = EngineGroup(self.engines)
        self._tasks: list[asyncio.Task[Any]] = []

    async def send(self, prompt: str | list[int], to: EngineClient | None = None, **options: Any) -> None:
        request = GenerationRequest(id=f"r{len(self._tasks)}", prompt=prompt, **options)
        self._tasks.append(asyncio.create_task(run(to or self.group, request)))
        await asyncio.sleep(0)

    def set_status(self, status: Any, *engines: EngineProcess) -> None:
        for engine in engines:
            engine._supervisor.health = Health(status=status, progress=0.5, error="trouble")

    @property
    def loads(self) -> list[int]:
        return [engine.in_flight for engine in self.engines]

    async def finish(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        assert self.loads == [0, 0, 0]


@pytest.fixture
async def fleet(fake_workers: list[FakeWorker]) -> AsyncIterator[Fleet]:
    fleet = Fleet()
    async with fleet.group:
        yield fleet


async def test_each_request_goes_where_the_fewest_are(fleet: Fleet) -> None:
    for i in range(9):
        await fleet.send(f"{i}, another one")
    assert fleet.loads == [3, 3, 3]


async def test_a_request_follows_its_prefix_until_that_queue_is_longer_by_a_margin(fleet: Fleet) -> None:
    await fleet.send("busy 0")
    await fleet.send(LONG + "first")
    assert fleet.loads == [1, 1, 0]
    for i in range(4):
        await fleet.send(LONG + str(i))
    assert fleet.loads == [1, 5, 0]
    await fleet.send(LONG + "one too many")
    assert fleet.loads == [1, 5, 1]


async def test_a_short_prefix_is_not_worth_any_queueing(fleet: Fleet) -> None:
    await fleet.send(LONG[:70])
    await fleet.send(LONG[:70])
    assert fleet.loads == [1, 1, 0]


async def test_a_short_prefix_decides_between_equals(fleet: Fleet) -> None:
    await fleet.send("busy 0")
    await fleet.send(LONG[:70])
    await fleet.finish()
    await fleet.send(LONG[:70])
    assert fleet.loads == [0, 1, 0]


async def test_requests_that_must_not_share_a_prefix_are_not_routed_by_it(
    fleet: Fleet, fake_workers: list[FakeWorker]
) -> None:
    await fleet.send("busy 0")
    await fleet.send(LONG, cache_salt="a")
    await fleet.finish()
    await fleet.send(LONG, cache_salt="b")
    await fleet.finish()
    await fleet.send(LONG, cache_prompt=False)
    assert [len(worker.n_tokens) for worker in fake_workers] == [3, 1, 0]


async def test_token_ids_have_prefixes_as_well(fleet: Fleet) -> None:
    await fleet.send("busy 0")
    await fleet.send(list(range(600)))
    await fleet.send([*range(500), 1])
    assert fleet.loads == [1, 2, 0]


async def test_a_worker_that_failed_gets_nothing(fleet: Fleet) -> None:
    await fleet.send(LONG)
    fleet.set_status("failed", fleet.engines[0])
    for i in range(6):
        await fleet.send(LONG + str(i))
    assert fleet.loads[0] == 1
    assert fleet.group.health() == Health(status="restarting", progress=0.5, error="trouble")


async def test_health_is_that_of_the_slowest_to_load_and_of_the_best_afterwards(fleet: Fleet) -> None:
    assert fleet.group.health().status == "ok"
    fleet.set_status("loading", fleet.engines[1])
    assert fleet.group.health().status == "loading"
    fleet.set_status("failed", *fleet.engines)
    assert fleet.group.health() == Health(status="failed", progress=0.5, error="trouble")


async def test_a_sleeping_worker_is_woken_only_when_the_others_are_full(fleet: Fleet) -> None:
    first, second, third = fleet.engines
    chosen: Callable[[], Any] = fleet.group._least_loaded
    fleet.set_status("sleeping", second, third)
    assert fleet.group.health().status == "ok"
    for _ in range(15):
        await fleet.send("a", to=first)
    assert chosen() is first
    for _ in range(2):
        await fleet.send("a", to=first)
    assert chosen() is second
    await fleet.send("a", to=second)  # it is being loaded
    assert chosen() is second
    fleet.set_status("sleeping", first)
    assert fleet.group.health().status == "sleeping"
    fleet.set_status("restarting", first)
    assert fleet.group.health().status == "restarting"


CONFIG = EngineConfig(model_path="m.gguf")


def test_each_device_has_a_worker_and_they_share_the_cores() -> None:
    configs = Deployment(devices=(0, 2)).configs(CONFIG)
    assert [config.device for config in configs] == [0, 2]
    assert [config.n_threads for config in configs] == [max(1, available_threads() // 2)] * 2


def test_more_workers_than_devices_take_turns() -> None:
    assert [config.device for config in Deployment(workers=3, devices=(1, 0)).configs(CONFIG)] == [1, 0, 1]


def test_a_single_worker_gets_the_configuration_unchanged() -> None:
    assert Deployment().configs(CONFIG) == [CONFIG]


@pytest.mark.parametrize(
    "settings",
    [{"workers": 0}, {"workers": 65}, {"devices": (-1,)}, {"step_timeout": 0.5}, {"in_process": True, "workers": 2}],
)
def test_invalid_values_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        Deployment(**settings)
