"""How a job runs: lines in parallel, written to disk in groups, and consistent whatever ends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from cppbatch.errors import EngineClosed, StorageError
from cppbatch.jobs.job_request import JobRequest, JobResponse
from cppbatch.jobs.job_runner import JobRunner, reject_unanswered
from cppbatch.jobs.journal import Journal
from tests.support.job_results import ids_of, item, lines_of, opened

GOOD = JobResponse(status=200, body={})


def a_run(
    journal: Journal,
    items: list[JobRequest],
    work: Callable[[JobRequest], Awaitable[JobResponse]],
    *,
    at_once: int = 4,
    places: asyncio.Semaphore | None = None,
) -> JobRunner:
    windows = iter([items[at : at + 10] for at in range(0, len(items), 10)])
    return JobRunner(windows, journal, work, places or asyncio.Semaphore(at_once))


async def test_every_item_is_answered_within_the_concurrency_limit(tmp_path: Path) -> None:
    running, most = 0, 0

    async def work(_: JobRequest) -> JobResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return GOOD

    items = [item(i) for i in range(1, 101)]
    await a_run(opened(tmp_path), items, work).run()
    assert sorted(ids_of(tmp_path / "out.jsonl")) == sorted(each.custom_id for each in items)
    assert most == 4


async def test_an_error_of_one_item_is_its_own(tmp_path: Path) -> None:
    async def work(one: JobRequest) -> JobResponse:
        bad = JobResponse(status=400, body={"error": {"message": "prompt: is too long"}})
        return bad if one.line == 7 else GOOD

    journal = opened(tmp_path)
    await a_run(journal, [item(i) for i in range(1, 21)], work).run()
    (error,) = lines_of(tmp_path / "errors.jsonl")
    assert (error["custom_id"], error["line"], error["response"]["status_code"]) == ("id-7", 7, 400)
    assert (journal.n_completed, journal.n_failed) == (19, 1)


async def test_when_the_engine_goes_what_was_answered_stays_and_the_rest_is_left(tmp_path: Path) -> None:
    n = 0

    async def work(_: JobRequest) -> JobResponse:
        nonlocal n
        n += 1
        if n == 30:
            raise EngineClosed("the engine is gone")
        await asyncio.sleep(0)
        return GOOD

    items = [item(i) for i in range(1, 101)]
    journal = opened(tmp_path)
    with pytest.raises(EngineClosed):
        await a_run(journal, items, work).run()
    journal.close()
    before = ids_of(tmp_path / "out.jsonl")
    assert 20 <= len(before) < 30

    async def works(_: JobRequest) -> JobResponse:
        return GOOD

    await a_run(opened(tmp_path), items, works).run()
    after = ids_of(tmp_path / "out.jsonl")
    assert after[: len(before)] == before
    assert sorted(after) == sorted(each.custom_id for each in items)


async def test_cancelled_it_records_what_was_answered(tmp_path: Path) -> None:
    async def work(one: JobRequest) -> JobResponse:
        if one.line > 3:
            await asyncio.Event().wait()
        return GOOD

    places = asyncio.Semaphore(4)
    run = asyncio.create_task(a_run(opened(tmp_path), [item(i) for i in range(1, 21)], work, places=places).run())
    await asyncio.sleep(0.1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ids_of(tmp_path / "out.jsonl") == ["id-1", "id-2", "id-3"]
    for _ in range(4):  # all places are free again
        await asyncio.wait_for(places.acquire(), 30)


async def test_a_cancelled_run_stops_reading_without_blocking_the_event_loop(tmp_path: Path) -> None:
    """As when a million lines that are done already are skipped."""
    journal = opened(tmp_path)
    n_read = 0
    is_reading, go_on = threading.Event(), threading.Event()

    def windows() -> Iterator[list[JobRequest]]:
        nonlocal n_read
        while True:
            is_reading.set()
            assert go_on.wait(60), "the event loop is blocked while a window is read"
            n_read += 1
            yield []

    async def work(_: JobRequest) -> JobResponse:
        return GOOD

    run = asyncio.create_task(JobRunner(windows(), journal, work, asyncio.Semaphore(1)).run())
    assert await asyncio.to_thread(is_reading.wait, 60)
    run.cancel()
    await asyncio.sleep(0.05)  # the loop runs during the read
    assert n_read == 0
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert n_read == 1


async def test_a_disk_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(_: JobRequest) -> JobResponse:
        return GOOD

    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    journal = opened(tmp_path)
    monkeypatch.setattr(journal, "record", full)
    with pytest.raises(StorageError, match="full"):
        await a_run(journal, [item(i) for i in range(1, 21)], work).run()


async def test_two_jobs_take_turns(tmp_path: Path) -> None:
    """However many items the first one has, the second one gets its share of the places."""
    order = []

    async def work(one: JobRequest) -> JobResponse:
        order.append(one.custom_id[0])
        await asyncio.sleep(0)
        return GOOD

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    places = asyncio.Semaphore(2)
    long = a_run(opened(tmp_path / "a"), [item(i, f"a{i}") for i in range(1, 201)], work, places=places)
    short = a_run(opened(tmp_path / "b"), [item(i, f"b{i}") for i in range(1, 21)], work, places=places)
    await asyncio.gather(long.run(), short.run())
    assert "".join(order).rindex("b") < 80


async def test_when_time_is_up_the_rest_gets_an_error_each(tmp_path: Path) -> None:
    items = [item(i) for i in range(1, 31)]
    journal = opened(tmp_path)

    async def work(one: JobRequest) -> JobResponse:
        if one.line > 5:
            raise EngineClosed("for this test")
        return GOOD

    with pytest.raises(EngineClosed):
        await a_run(journal, items, work, at_once=1).run()
    reject_unanswered(iter([items[:10], items[10:]]), journal, "batch_expired", "there was no time")
    errors = lines_of(tmp_path / "errors.jsonl")
    assert [error["line"] for error in errors] == list(range(6, 31))
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}
    assert len(ids_of(tmp_path / "out.jsonl")) == 5
