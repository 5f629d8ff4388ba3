"""`GET /live` without HTTP: snapshots are shared, never queued, and taken only while a client reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest

from cppbatch.cluster.engines.client import Health, WorkerLive
from cppbatch.cluster.engines.latest_state import LatestState
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.server.api.live_feed import LiveFeed
from cppbatch.server.observe.live import LiveIntervals, LiveTimes
from tests.support.fakes import fake_engine, greedy, run_steps
from tests.support.listening import until

SOON = 5.0


class Source:
    """Numbers as snapshots."""

    def __init__(self) -> None:
        self.n_made = 0
        self.n_stops = 0
        self.is_new = True
        self.error: Exception | None = None

    async def make(self) -> tuple[int, bool]:
        if self.error:
            raise self.error
        self.n_made += 1
        return self.n_made, self.is_new

    def feed(self, *, interval: float = 0.005, heartbeat: float = SOON) -> LiveFeed[int]:
        def stopped() -> None:
            self.n_stops += 1

        return LiveFeed(self.make, on_stop=stopped, interval=interval, heartbeat=heartbeat)


async def following(snapshots: AsyncGenerator[int | None, None]) -> int | None:
    return await asyncio.wait_for(anext(snapshots), SOON)


async def test_without_a_reader_nothing_is_made_and_after_the_last_one_nothing_more() -> None:
    source = Source()
    feed = source.feed()
    await asyncio.sleep(0.03)
    assert source.n_made == 0
    first, second = feed.snapshots(), feed.snapshots()
    await following(first)
    await following(second)
    await first.aclose()
    await following(second)
    assert source.n_stops == 0
    await second.aclose()
    n_made = source.n_made
    await asyncio.sleep(0.03)
    assert (source.n_made, source.n_stops) == (n_made, 1)
    async with contextlib.aclosing(feed.snapshots()) as again:
        assert await following(again) == n_made + 1


async def test_all_readers_get_the_same_snapshots() -> None:
    source = Source()
    feed = source.feed(interval=0.02)
    got: list[list[int | None]] = [[] for _ in range(20)]

    async def read(into: list[int | None]) -> None:
        async with contextlib.aclosing(feed.snapshots()) as snapshots:
            async for snapshot in snapshots:
                into.append(snapshot)
                if snapshot == 8:
                    return

    await asyncio.wait_for(asyncio.gather(*(read(into) for into in got)), SOON)
    assert got == [list(range(1, 9))] * 20
    assert source.n_made == 8


async def test_a_slow_reader_gets_the_latest_snapshot_and_none_of_those_between() -> None:
    source = Source()
    async with contextlib.aclosing(source.feed().snapshots()) as snapshots:
        first = await following(snapshots)
        await until(lambda: source.n_made >= 10)
        n_made = source.n_made
        second = await following(snapshots)
    assert first == 1
    assert second is not None
    assert second >= n_made


async def test_an_unchanged_snapshot_goes_to_new_readers_only_and_the_others_get_a_heartbeat() -> None:
    source = Source()
    feed = source.feed(heartbeat=0.05)
    async with contextlib.aclosing(feed.snapshots()) as old, contextlib.aclosing(feed.snapshots()) as new:
        source.is_new = False
        assert await following(old) is None
        source.is_new = True
        assert await following(old) is not None
        source.is_new = False
        while await following(old) is not None:
            pass
        n_made = source.n_made
        latest = await following(new)
        assert latest is not None
        assert latest >= n_made


async def test_a_closed_feed_ends_its_readers_at_once_even_if_a_client_does_not_read() -> None:
    feed = Source().feed(interval=60, heartbeat=60)

    async def read() -> None:
        async for _ in feed.snapshots():
            pass

    async def send_to_nobody() -> None:
        async for _ in feed.snapshots():
            with feed.sending():
                await asyncio.Event().wait()

    readers = [asyncio.create_task(read()), asyncio.create_task(send_to_nobody())]
    await asyncio.sleep(0.02)
    feed.close()
    await asyncio.wait_for(asyncio.wait(readers), 1)
    assert (readers[0].exception(), readers[1].cancelled()) == (None, True)
    assert [snapshot async for snapshot in feed.snapshots()] == []


async def test_a_snapshot_that_cannot_be_made_is_logged_and_the_next_one_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Source()
    source.error = RuntimeError("made to fail")
    async with contextlib.aclosing(source.feed().snapshots()) as snapshots:
        reading = asyncio.ensure_future(following(snapshots))
        await until(lambda: "made to fail" in caplog.text)
        source.error = None
        assert await reading == 1


def engine_after(n_steps: int) -> LiveEngine:
    with fake_engine() as engine:
        engine.add_request([1, 2, 3], greedy(20, ignore_eos=True))
        run_steps(engine, n_steps)
        return engine.live()


async def test_a_busy_worker_is_queried_each_time_and_an_idle_one_once() -> None:
    latest, asked = LatestState[LiveEngine](), list[int]()

    def ask() -> None:
        asked.append(1)
        latest.received(engine_after(len(asked)))

    for _ in range(2):
        await latest.get(ask, 0.0)
    assert len(asked) == 2
    await asyncio.sleep(0.01)
    for idle_seconds in (0.005, 100.0, 100.2):  # it was asked before it became idle; afterwards; afterwards
        engine, age = await latest.get(ask, idle_seconds)
    assert len(asked) == 3
    assert engine is not None
    assert engine.counters.steps == 3
    assert age is not None
    assert 0 <= age < SOON


async def test_a_worker_in_a_long_step_is_queried_once_and_shows_its_earlier_state() -> None:
    latest, asked = LatestState[LiveEngine](), list[int]()
    assert await latest.get(lambda: asked.append(1), 0.0) == (None, None)
    latest.received(engine_after(1))
    asked.clear()
    for _ in range(3):
        engine, age = await latest.get(lambda: asked.append(1), 0.0)
        assert engine is not None
        assert engine.counters.steps == 1
    assert len(asked) == 1
    assert age is not None
    assert age >= 0.4, "three times the wait for an answer"
    latest.reset()
    assert await latest.get(lambda: asked.append(1), 0.0) == (None, None)
    assert len(asked) == 2


def worker(engine: LiveEngine | None, *, pid: int = 1, in_flight: int = 1) -> WorkerLive:
    return WorkerLive(
        name="0", pid=pid, device=None, health=Health(status="ok"), in_flight=in_flight, restarts=0, draining=False,
        age=0.0 if engine else None, engine=engine,
    )  # fmt: skip


def at(clock: float, **counters: Any) -> LiveEngine:
    engine = engine_after(1)
    replaced: Callable[..., Any] = msgspec.structs.replace
    return replaced(engine, clock=clock, counters=replaced(engine.counters, **counters))  # type: ignore[no-any-return]


def test_an_interval_is_what_was_done_between_two_states() -> None:
    intervals = LiveIntervals()
    zero = {"steps": 10, "decode_steps": 8, "decode_rows": 100, "generated_tokens": 1000, "prompt_tokens": 50}
    first = at(100.0, **zero, step_seconds={"decode": 7.0})
    later = {"steps": 20, "decode_steps": 16, "decode_rows": 228, "generated_tokens": 1128, "prompt_tokens": 90}
    second = at(100.5, **later, step_seconds={"decode": 7.25})
    assert intervals.add([worker(first)])[0].interval is None
    (shown,) = intervals.add([worker(second)])
    interval = shown.interval
    assert interval is not None
    assert (interval.seconds, interval.steps, interval.batch_size) == (0.5, 10, 16.0)
    assert (interval.tokens_per_second, interval.prompt_tokens_per_second) == (256.0, 80.0)
    assert interval.phases == {"decode": 0.25}
    (same,) = intervals.add([worker(second)])
    assert same.interval == interval, "a worker in a long step"
    (idle,) = intervals.add([worker(second, in_flight=0)])
    assert idle.interval is None


def test_a_restarted_worker_starts_a_new_interval() -> None:
    intervals = LiveIntervals()
    intervals.add([worker(at(100.0, steps=500))])
    for restarted in (worker(None, pid=1), worker(at(3.0, steps=2), pid=2)):
        assert intervals.add([restarted])[0].interval is None
    interval = intervals.add([worker(at(4.0, steps=5), pid=2)])[0].interval
    assert interval is not None
    assert interval.steps == 3


def test_recent_times_are_forgotten() -> None:
    now = 50.0
    times = LiveTimes(lambda: now)
    times.add_first_token(now, 0.3)
    times.add_gap(now, 0.02, 3)
    times.add_gap(now, 0.5, 1)
    assert (times.first_token().n, times.first_token().p50) == (1, 0.3)
    gaps = times.inter_token()
    assert (gaps.n, gaps.p50, gaps.p95) == (4, 0.02, 0.5)
    now += 2
    assert (times.first_token().n, times.inter_token().n, times.inter_token().p50) == (1, 0, None)
    now += 10
    assert times.first_token().n == 0
