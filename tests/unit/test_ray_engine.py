"""Requests over several replicas: batched events in order, lost replicas, cancels. Without Ray: the cluster is fake."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cppbatch import FinishReason, GenerationRequest, SamplingParams
from cppbatch.errors import EngineClosed, QueueFull
from cppbatch.ray.engine import RayEngine
from cppbatch.ray.replica.set import ReplicaSetStatus
from tests.support import submitting
from tests.support.fake_replicas import FakeReplicas, settle, text_of


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the replicas is asked for every 20 ms."""
    for name in ("_STATUS_PERIOD_S", "_LOADING_PERIOD_S"):
        monkeypatch.setattr(f"cppbatch.ray.engine.{name}", 0.02)


def request(name: str, n: int = 10, prompt: str | None = None) -> GenerationRequest:
    return GenerationRequest(id=name, prompt=prompt or name, params=SamplingParams(max_tokens=n))


class Reader(submitting.Reader):
    def assert_complete(self) -> None:
        assert self.task.done()
        self.task.result()
        assert self.text == text_of(self.asked)
        assert self.finish_reason is FinishReason.LENGTH
        assert [token for event in self.events for token in event.tokens] == list(
            range(self.asked.params.max_tokens or 0)
        )


@contextlib.asynccontextmanager
async def opened(cluster: FakeReplicas, **settings: Any) -> AsyncIterator[RayEngine]:
    engine = cluster.engine(**settings)
    await settle()
    async with engine:
        yield engine


async def start(engine: RayEngine, n: int, tokens: int = 10) -> list[Reader]:
    readers = [Reader(engine, request(f"r{i}", tokens + i)) for i in range(n)]
    await settle()
    return readers


async def test_each_request_gets_its_own_text_in_order() -> None:
    cluster = FakeReplicas(3)
    async with opened(cluster) as engine:
        readers = await start(engine, 12)
        await cluster.step(30)
        for reader in readers:
            reader.assert_complete()


async def test_a_replica_sends_one_message_a_step_for_all_requests() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        readers = await start(engine, 8, tokens=20)
        before = cluster.replicas[0].n_messages
        await cluster.step(15)
        assert cluster.replicas[0].n_messages - before == 15
        await cluster.step(20)  # requests end one after the other, the carrier first
        assert cluster.replicas[0].n_messages - before == 27
        for reader in readers:
            reader.assert_complete()


async def test_messages_of_two_carriers_that_overtake_each_other_are_put_in_order() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        first, second = Reader(engine, request("a", 3)), Reader(engine, request("b", 6))
        await settle()
        carrier = cluster.replicas[0].streams[0]
        carrier.go.clear()
        await cluster.step(6)  # the second stream carries from the fourth message on
        assert not first.events
        assert not second.events
        carrier.go.set()
        await settle()
        first.assert_complete()
        second.assert_complete()


async def test_events_may_overtake_the_opening_of_their_own_stream() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        first = (await start(engine, 1))[0]
        second = Reader(engine, request("second"))
        replica = cluster.replicas[0]
        await _until(lambda: len(replica.streams) == 2)
        replica.streams[1].go.clear()
        await settle()
        await cluster.step(4)
        assert second.text == "second0 second1 second2 second3 "
        replica.streams[1].go.set()
        await cluster.step(6)
        first.assert_complete()
        second.assert_complete()


@pytest.mark.parametrize("unread", [True, False], ids=["last messages arrive", "last messages are lost"])
async def test_the_requests_of_a_killed_replica_continue_elsewhere(unread: bool) -> None:
    cluster = FakeReplicas(3)
    async with opened(cluster) as engine:
        readers = await start(engine, 12, tokens=20)
        await cluster.step(7)
        for stream in cluster.replicas[0].streams:
            stream.go.clear()
        await cluster.step(3)  # these events of the first replica are on the way
        cluster.replicas[0].kill(unread=unread)
        await settle()
        await cluster.step(40)
        for reader in readers:
            reader.assert_complete()


async def test_a_broken_stream_of_a_living_replica_leaves_no_hole() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        readers = await start(engine, 4, tokens=20)
        await cluster.step(5)
        carrier = cluster.replicas[0].streams[0]
        carrier.go.clear()
        await cluster.step(2)
        carrier.break_off(keep=False)  # its messages are lost; the other streams continue
        await settle()
        assert len(cluster.replicas[0].engine.running) == 4, "the requests of the lost group have ended in the replica"
        late = Reader(engine, request("late", 20))
        await settle()
        await cluster.step(30)
        for reader in [*readers, late]:
            reader.assert_complete()


async def test_a_request_on_the_way_into_a_lost_group_is_sent_again() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        first = (await start(engine, 1, tokens=20))[0]
        second = Reader(engine, request("second", 20))
        replica = cluster.replicas[0]
        await _until(lambda: len(replica.streams) == 2)
        replica.streams[1].go.clear()  # the front does not have the request's group yet
        replica.streams[0].break_off(keep=False)
        await settle()
        replica.streams[0].go.set()
        await settle()
        await cluster.step(30)
        first.assert_complete()
        second.assert_complete()


async def test_new_replicas_get_their_share_of_the_waiting_requests() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster, n_parallel=2) as engine:
        running = await start(engine, 2, tokens=100)
        await cluster.step()
        waiting = [Reader(engine, request(f"w{i}")) for i in range(10)]
        await settle()
        first, second = cluster.replicas[0], cluster.add()
        await _until(lambda: second.engine.running)
        await settle()
        assert [len(replica.engine.running) for replica in (first, second)] == [6, 6]
        assert not {reader.asked.id for reader in running} & {str(r[0].prompt) for r in second.engine.running.values()}
        await cluster.step(100)
        for reader in running + waiting:
            reader.assert_complete()


async def test_a_request_fails_after_five_lost_replicas_in_a_row() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        reader = Reader(engine, request("a"))
        for _ in range(5):
            await settle()
            cluster.add()
            cluster.replicas[-2].kill()
        await settle()
        assert reader.finish_reason is FinishReason.ERROR
        assert reader.events[-1].error == (
            "lost 5 replicas in a row while processing this request; the last one: killed"
        )


async def test_a_token_resets_the_count_of_lost_replicas() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        reader = Reader(engine, request("a", 20))
        for _ in range(12):
            await settle()
            await cluster.step()
            cluster.add()
            cluster.replicas[-2].kill()
        await settle()
        await cluster.step(8)
        reader.assert_complete()


async def test_a_replica_with_a_failed_engine_passes_its_requests_on() -> None:
    cluster = FakeReplicas(2)
    async with opened(cluster) as engine:
        failed, other = cluster.replicas
        failed.engine.failed = "the engine does not accept requests: it is failed"
        cluster.choose = iter([failed, other]).__next__
        reader = Reader(engine, request("a"))
        await settle()
        await cluster.step(10)
        reader.assert_complete()


async def test_closing_the_iterator_cancels_in_the_replica() -> None:
    cluster = FakeReplicas(2)
    async with opened(cluster) as engine:
        readers = await start(engine, 6)
        await cluster.step(2)
        carriers = [replica.streams[0] for replica in cluster.replicas]
        readers[0].task.cancel()
        readers[1].task.cancel()
        await settle()
        assert sum(len(replica.engine.running) for replica in cluster.replicas) == 4
        assert len(cluster.cancels) == 2
        assert not any(stream in replica.streams for replica in cluster.replicas for stream in carriers)
        await cluster.step(20)
        for reader in readers[2:]:
            reader.assert_complete()


async def test_a_cancel_that_does_not_reach_a_draining_replica_closes_its_streams() -> None:
    cluster = FakeReplicas(2)
    async with opened(cluster) as engine:
        readers = await start(engine, 6)
        await cluster.step(2)
        draining, other = cluster.replicas
        draining.drains = True
        there = {running.prompt for running, *_ in draining.engine.running.values()}
        first, *rest = [reader for reader in readers if reader.asked.prompt in there]
        await engine.cancel(first.asked.id)
        await settle()
        assert first.finish_reason is FinishReason.CANCELLED
        assert not draining.engine.running
        assert len(other.engine.running) == 5
        await cluster.step(20)
        for reader in rest:
            reader.assert_complete()


async def test_a_request_that_no_replica_runs_yet_is_cancelled_here_and_when_one_opens_its_stream() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        cluster.replicas[0].is_alive = False
        reader = Reader(engine, request("a"))
        await settle()
        await engine.cancel("a")
        await settle()
        assert reader.finish_reason is FinishReason.CANCELLED
        replica = cluster.add()
        await settle()
        assert not replica.engine.running


async def test_a_cancelled_request_does_not_outlive_its_replica() -> None:
    cluster = FakeReplicas(2)
    async with opened(cluster) as engine:
        cluster.choose = lambda: cluster.alive[0]
        reader = Reader(engine, request("a"))
        await settle()
        cluster.replicas[0].streams[0].go.clear()
        await engine.cancel("a")
        await settle()
        cluster.replicas[0].kill(unread=False)
        await settle()
        assert reader.finish_reason is FinishReason.CANCELLED
        assert not cluster.replicas[1].engine.running


async def test_more_requests_than_all_replicas_run_wait_up_to_max_queue() -> None:
    cluster = FakeReplicas(2)
    async with opened(cluster, n_parallel=3, max_queue=4) as engine:
        readers = await start(engine, 2 * 3 + 4)
        with pytest.raises(QueueFull):
            await anext(engine.submit(request("one more")))
        await cluster.step(10)
        assert readers[0].task.done()
        late = Reader(engine, request("late", 3))
        await settle()
        await cluster.step(20)
        late.assert_complete()


async def test_a_replica_ends_the_requests_of_a_front_that_does_not_answer() -> None:
    cluster = FakeReplicas(2)
    async with opened(cluster) as engine, opened(cluster) as other:
        cluster.choose = lambda: cluster.replicas[0]
        readers = await start(engine, 3)
        reader = Reader(other, request("other"))
        await settle()
        await cluster.step(2)
        (silent, _), service = cluster.leases, cluster.replicas[0].service
        assert len(service.fronts) == 2
        cluster.choose = lambda: cluster.replicas[1]
        service.drop_front(silent)
        await settle()
        assert len(cluster.replicas[0].engine.running) == 1
        await cluster.step(12)
        for each in [*readers, reader]:  # this front lives, so its requests continue elsewhere
            each.assert_complete()


async def test_closing_ends_requests_here_and_in_the_replicas() -> None:
    cluster = FakeReplicas(1)
    engine = cluster.engine()
    await settle()
    reader = Reader(engine, request("a"))
    await settle()
    await engine.close()
    await settle()
    assert reader.finish_reason is FinishReason.CANCELLED
    assert not cluster.replicas[0].engine.running
    assert engine.health().status == "closed"
    with pytest.raises(EngineClosed, match="it is closed"):
        await anext(engine.submit(request("b")))


async def test_health_reports_the_state_of_the_replicas() -> None:
    cluster = FakeReplicas(0)
    cluster.state = ReplicaSetStatus(status="starting", n_wanted=1, progress=0.25)
    engine = cluster.engine()
    await settle()
    assert (engine.health().status, engine.health().progress) == ("loading", 0.25)
    with pytest.raises(EngineClosed, match="it is loading"):
        await anext(engine.submit(request("a")))
    cluster.add()
    cluster.state = None
    await asyncio.wait_for(engine.loaded(), 5)
    assert engine.health().status == "ok"
    assert engine.info.n_vocab == 256
    cluster.state = ReplicaSetStatus(status="starting", n_wanted=1, message="no node has 8 free CPUs")
    await _until(lambda: engine.health().status == "restarting")
    assert engine.health().takes_requests
    assert engine.health().error == "no node has 8 free CPUs"
    await engine.close()


async def test_a_cluster_that_does_not_answer_is_the_reason_that_health_gives() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        cluster.status_error = ConnectionError("no route to host")
        await _until(lambda: engine.health().status == "restarting")
        assert engine.health().error == "the Ray cluster does not respond (ConnectionError: no route to host)"
        cluster.status_error = None
        await _until(lambda: engine.health().status == "ok")


async def test_requests_end_when_the_deployment_has_failed() -> None:
    cluster = FakeReplicas(1)
    async with opened(cluster) as engine:
        reader = Reader(engine, request("a"))
        await settle()
        cluster.state = ReplicaSetStatus(status="failed", message="the application was deleted")
        await _until(reader.task.done)
        assert reader.finish_reason is FinishReason.ERROR
        assert reader.events[-1].error == "the application was deleted"


async def test_workers_of_all_replicas_are_listed() -> None:
    cluster = FakeReplicas(3)
    async with opened(cluster) as engine:
        await start(engine, 3)
        assert [worker.in_flight for worker in await engine.workers()] == [1, 1, 1]
        with pytest.raises(EngineClosed, match="no replica responds"):  # these workers have no stats
            await engine.stats()


async def _until(condition: Any) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + 5
        await asyncio.sleep(0.001)
