"""Several workers: which one gets a request. No process is started."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cppbatch import FinishReason, GenerationEvent, GenerationRequest
from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines.client import Health
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.request import Prompt
from cppbatch.errors import ConfigError

LONG = "All of them begin with these words, which are worth reading only once. " * 40  # 2,800 letters


class Outputs:
    """One event, when the worker is let go."""

    def __init__(self, request_id: str, go: asyncio.Event) -> None:
        self._request_id, self._go = request_id, go
        self.finished = False

    async def get(self) -> GenerationEvent:
        await self._go.wait()
        self.finished = True
        return GenerationEvent(request_id=self._request_id, finish_reason=FinishReason.STOP)


class Worker:
    """Records its requests; each of them runs until it is released."""

    config = EngineConfig(model_path="", n_parallel=16)

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.in_flight = 0
        self.status: Any = "ok"
        self.go = asyncio.Event()

    def health(self) -> Health:
        return Health(status=self.status, progress=0.5, error=None if self.status == "ok" else "trouble")

    @contextlib.contextmanager
    def open(self, request: GenerationRequest) -> Iterator[Outputs]:
        self.prompts.append(request.prompt)
        self.in_flight += 1
        yield Outputs(request.id, self.go)
        self.in_flight -= 1


class Fleet:
    """Three such workers in a group."""

    def __init__(self) -> None:
        self.workers = [Worker() for _ in range(3)]
        engines: Any = self.workers
        self.group = EngineGroup(engines)
        self._n = 0

    async def send(self, prompt: str | list[int], **options: Any) -> asyncio.Task[None]:
        self._n += 1
        request = GenerationRequest(id=f"r{self._n}", prompt=prompt, **options)

        async def run() -> None:
            async for _ in self.group.submit(request):
                pass

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        return task

    @property
    def loads(self) -> list[int]:
        return [worker.in_flight for worker in self.workers]

    async def finish(self) -> None:
        for worker in self.workers:
            worker.go.set()
        await asyncio.sleep(0.01)
        assert self.loads == [0, 0, 0]
        for worker in self.workers:
            worker.go.clear()


@pytest.fixture
async def fleet() -> Fleet:
    return Fleet()


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


async def test_requests_that_must_not_share_a_prefix_are_not_routed_by_it(fleet: Fleet) -> None:
    await fleet.send("busy 0")
    await fleet.send(LONG, cache_salt="a")
    await fleet.finish()
    await fleet.send(LONG, cache_salt="b")
    await fleet.finish()
    await fleet.send(LONG, cache_prompt=False)
    assert [len(worker.prompts) for worker in fleet.workers] == [3, 1, 0]


async def test_token_ids_have_prefixes_as_well(fleet: Fleet) -> None:
    await fleet.send("busy 0")
    await fleet.send(list(range(600)))
    await fleet.send([*range(500), 1])
    assert fleet.loads == [1, 2, 0]


async def test_a_worker_that_failed_gets_nothing(fleet: Fleet) -> None:
    await fleet.send(LONG)
    fleet.workers[0].status = "failed"
    for i in range(6):
        await fleet.send(LONG + str(i))
    assert len(fleet.workers[0].prompts) == 1
    assert fleet.group.health() == Health(status="restarting", progress=0.5, error="trouble")


async def test_health_is_that_of_the_slowest_to_load_and_of_the_best_afterwards(fleet: Fleet) -> None:
    assert fleet.group.health().status == "ok"
    fleet.workers[1].status = "loading"
    assert fleet.group.health().status == "loading"
    for worker in fleet.workers:
        worker.status = "failed"
    assert fleet.group.health() == Health(status="failed", progress=0.5, error="trouble")


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


async def test_a_sleeping_worker_is_woken_only_when_the_others_are_full() -> None:
    fleet = Fleet()
    chosen: Callable[[], Any] = fleet.group._least_loaded
    for worker in fleet.workers[1:]:
        worker.status = "sleeping"
    assert fleet.group.health().status == "ok"
    fleet.workers[0].in_flight = 15
    assert chosen() is fleet.workers[0]
    fleet.workers[0].in_flight = 17
    assert chosen() is fleet.workers[1]
    fleet.workers[1].in_flight = 1  # it is being loaded
    assert chosen() is fleet.workers[1]
    fleet.workers[0].status = "sleeping"
    assert fleet.group.health().status == "sleeping"
    fleet.workers[0].status = "restarting"
    assert fleet.group.health().status == "restarting"
