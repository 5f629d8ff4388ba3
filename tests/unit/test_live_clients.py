"""`EngineClient.live` of workers and replicas that are fake: busy, idle, dead, asleep, draining."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cppbatch import EngineConfig, EngineProcess, GenerationRequest, SamplingParams
from cppbatch.cluster.engines import supervisor
from cppbatch.cluster.engines.client import EngineClient, WorkerLive
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.retries import Pauses
from tests.support import submitting
from tests.support.fake_replicas import FakeReplicas, settle
from tests.support.fake_workers import FakeWorker, fake_workers
from tests.support.listening import until

__all__ = ["fake_workers"]

CONFIG = EngineConfig("model.gguf", n_parallel=8)


def run(engine: EngineClient, name: str, n_tokens: int = 4) -> asyncio.Task[Any]:
    request = GenerationRequest(id=name, prompt=name, params=SamplingParams(max_tokens=n_tokens))
    return asyncio.create_task(submitting.run(engine, request))


async def one(engine: EngineClient) -> WorkerLive:
    (worker,) = await engine.live()
    return worker


async def test_a_busy_worker_shows_its_rows_and_an_idle_one_is_not_queried(fake_workers: list[FakeWorker]) -> None:
    async with EngineProcess(CONFIG) as engine:
        (process,) = fake_workers
        running = [run(engine, "a"), run(engine, "b")]
        await until(lambda: len(process.sequences) == 2)
        live = await one(engine)
        assert live.engine is not None
        assert (len(live.engine.rows), live.in_flight, live.health.status) == (2, 2, "ok")
        while not all(task.done() for task in running):
            process.step()
            await asyncio.sleep(0)
        live = await one(engine)
        assert live.engine is not None
        assert (live.engine.rows, live.in_flight) == ([], 0)
        n_asked = process.n_live
        for _ in range(20):
            await one(engine)
        assert process.n_live == n_asked


async def test_a_worker_that_dies_shows_its_restart_and_no_rows_of_before(
    fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_PAUSES", Pauses(0.4, 30.0))
    async with EngineProcess(CONFIG) as engine:
        running = run(engine, "a")
        await until(lambda: fake_workers[0].sequences)
        assert (await one(engine)).engine is not None
        fake_workers[0].die()
        await until(lambda: engine.health().status == "restarting")
        live = await one(engine)
        assert (live.engine, live.age, live.pid, live.health.status, live.in_flight) == (
            None,
            None,
            None,
            "restarting",
            1,
        )
        assert live.restarts == 1
        await until(lambda: engine.health().status == "ok" and fake_workers[-1].sequences)
        live = await one(engine)
        assert live.engine is not None
        assert len(live.engine.rows) == 1
        running.cancel()


async def test_a_live_query_ends_with_its_worker(fake_workers: list[FakeWorker]) -> None:
    async with EngineProcess(CONFIG) as engine:
        fake_workers[0].answers_live = False
        running = run(engine, "a")
        asking = asyncio.create_task(engine.live())
        await until(lambda: fake_workers[0].n_live)
        fake_workers[0].die()
        await asking
        await until(lambda: engine.health().status == "ok" and len(fake_workers) == 2)
        assert (await one(engine)).engine is not None
        assert fake_workers[1].n_live == 1
        running.cancel()


async def test_a_worker_that_sleeps_is_neither_woken_nor_kept_awake(fake_workers: list[FakeWorker]) -> None:
    async with EngineProcess(CONFIG, sleep_idle_seconds=0.2) as engine:
        await until(lambda: engine.health().status == "sleeping")
        live = await one(engine)
        assert (live.health.status, live.engine, live.age) == ("sleeping", None, None)
        for _ in range(20):
            await one(engine)
        await asyncio.sleep(0.05)
        assert len(fake_workers) == 1
        assert (await one(engine)).health.status == "sleeping"


async def test_a_group_shows_each_of_its_workers(fake_workers: list[FakeWorker]) -> None:
    async with EngineGroup([EngineProcess(CONFIG, name=str(i)) for i in range(3)]) as group:
        fake_workers[1].answers_live = False  # in a long step
        live = await group.live()
        assert [worker.name for worker in live] == ["0", "1", "2"]
        assert [worker.engine is None for worker in live] == [False, True, False]


async def test_each_replica_that_answers_is_shown_and_an_idle_cluster_is_polled_once_a_second() -> None:
    cluster = FakeReplicas(2)
    engine = cluster.engine()
    await settle()
    async with engine:
        assert len(await engine.live()) == 2
        for _ in range(10):
            await engine.live()
        assert [replica.engine.n_live for replica in cluster.replicas] == [1, 1]
        running = run(engine, "a", 1000)
        await until(lambda: any(replica.engine.running for replica in cluster.replicas))
        for _ in range(3):
            live = await engine.live()
        assert sum(worker.in_flight for worker in live) == 1
        assert [replica.engine.n_live for replica in cluster.replicas] == [4, 4]
        cluster.replicas[0].is_alive = False
        assert len(await engine.live()) == 1
        running.cancel()
    assert await engine.live() == []
