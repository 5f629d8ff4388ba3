"""LocalEngine, and what EngineProcess shares with it: every request ends in one terminal event, nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cppbatch import FinishReason, GenerationEvent, GenerationRequest, LocalEngine, SamplingParams
from cppbatch.cluster.engines import local
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig
from cppbatch.engine.core import EngineCore
from cppbatch.engine.request import RequestUsage
from cppbatch.errors import EngineClosed, InvalidRequest, ModelError, QueueFull
from tests.support import tiny_models
from tests.support.fixtures import engine_of
from tests.support.listening import until
from tests.support.submitting import run

T = TypeVar("T")

SETTINGS: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 8, "n_batch": 64, "n_threads": 1, "flash_attn": "off"}

engine = engine_of(LocalEngine, EngineProcess, **SETTINGS)


def request(request_id: str = "a", *, max_tokens: int = 16, prompt: str = "Hello") -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(id=request_id, prompt=prompt, params=params)


async def soon(awaitable: Awaitable[T], seconds: float = 60) -> T:
    return await asyncio.wait_for(awaitable, seconds)


async def started(engine: EngineClient, its: GenerationRequest) -> asyncio.Task[list[GenerationEvent]]:
    """A task that collects a request's events, once the first one is there."""
    first = asyncio.Event()

    async def collect() -> list[GenerationEvent]:
        events = []
        async for event in engine.submit(its):
            events.append(event)
            first.set()
        return events

    task = asyncio.create_task(collect())
    await soon(first.wait())
    return task


async def assert_everything_is_free(engine: EngineClient) -> None:
    stats = await soon(engine.stats())
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.kv_cells_used, stats.swapped_bytes) == (0, 0)
    assert stats.seq_ids_free + stats.prefixes_in_cells == stats.seq_ids


def assert_ends_once(events: list[GenerationEvent], reason: FinishReason) -> None:
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [reason]


def usage_of(events: list[GenerationEvent]) -> RequestUsage:
    usage = events[-1].usage
    assert usage
    return usage


# --- running -------------------------------------------------------------------------------------------------------


async def test_sixteen_requests_at_once_get_the_texts_they_get_alone(engine: EngineClient) -> None:
    requests = [request(str(i), prompt=f"{i} times " * i or "none") for i in range(16)]
    alone = [await soon(run(engine, its)) for its in requests]
    together = await soon(asyncio.gather(*(run(engine, its) for its in requests)))
    for mine, theirs in zip(together, alone, strict=True):
        assert_ends_once(mine, FinishReason.LENGTH)
        assert "".join(event.text for event in mine) == "".join(event.text for event in theirs)
        assert usage_of(mine).completion_tokens == 16
    await assert_everything_is_free(engine)


async def test_a_bad_request_is_refused_and_the_engine_continues(engine: EngineClient) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        await soon(run(engine, request(prompt="x" * 2000)))
    assert_ends_once(await soon(run(engine, request())), FinishReason.LENGTH)


async def test_the_loaded_engine_reports_its_model_and_health(engine: EngineClient) -> None:
    assert engine.info.name == "tiny-llama"
    assert (engine.health().status, engine.health().progress) == ("ok", 1.0)


# --- loading -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Loading stops half-way until this event is set."""
    gate = threading.Event()

    def load(config: EngineConfig, *, progress: Callable[[float], bool], **hooks: Any) -> EngineCore:
        assert progress(0.5)
        assert gate.wait(20)
        return EngineCore(config, progress=progress, **hooks)

    monkeypatch.setattr(local, "EngineCore", load)
    yield gate
    gate.set()


async def test_health_reports_the_loading_progress_and_requests_are_refused_until_then(
    tiny_llama: Path, gate: threading.Event
) -> None:
    engine = LocalEngine(tiny_llama, **SETTINGS)
    await until(lambda: engine.health().progress == 0.5)
    assert engine.health().status == "loading"
    with pytest.raises(EngineClosed, match="loading"):
        await soon(run(engine, request()))
    with pytest.raises(EngineClosed, match="loading"):
        engine.info  # noqa: B018
    gate.set()
    await soon(engine.loaded())
    assert engine.health().status == "ok"
    await soon(engine.close())


async def test_closing_while_loading_stops_loading(tiny_llama: Path, gate: threading.Event) -> None:
    engine = LocalEngine(tiny_llama, **SETTINGS)
    await until(lambda: engine.health().progress == 0.5)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    gate.set()
    await soon(closing)
    with pytest.raises(ModelError, match="stopped"):
        await soon(engine.loaded())


async def test_a_model_that_does_not_load_raises_its_error_and_health_keeps_it(tmp_path: Path) -> None:
    engine = LocalEngine(tiny_models.not_gguf(tmp_path / "page.gguf"), **SETTINGS)
    with pytest.raises(ModelError, match=r"page\.gguf"):
        await soon(engine.loaded())
    assert engine.health().status == "failed"
    assert "page.gguf" in (engine.health().error or "")
    with pytest.raises(EngineClosed, match="failed"):
        await soon(run(engine, request()))
    await soon(engine.close())


async def test_async_with_raises_what_loading_raised(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        async with LocalEngine(tiny_models.empty(tmp_path / "empty.gguf"), **SETTINGS):
            pass


# --- forced continuation -------------------------------------------------------------------------------------------


async def test_update_request_appends_tokens_to_a_running_text_on_the_asyncio_engines_too(
    engine: LocalEngine | EngineProcess,
) -> None:
    """Every given token is in the text, in one piece, and counts as generated; the text continues to its maximum."""
    task = await started(engine, request(max_tokens=900))
    assert await soon(engine.update_request("a", [7, 8, 9, 7]))
    with pytest.raises(InvalidRequest, match="tokens: has 2000 ids"):
        await soon(engine.update_request("a", [7] * 2000))
    assert not await soon(engine.update_request("nobody", [7]))
    events = await soon(task)
    tokens = [token for event in events for token in event.tokens]
    assert any(tokens[i : i + 4] == [7, 8, 9, 7] for i in range(len(tokens)))
    assert len(tokens) == usage_of(events).completion_tokens == 900
    assert not await soon(engine.update_request("a", [7]))
    await assert_everything_is_free(engine)


# --- cancelling ----------------------------------------------------------------------------------------------------


async def test_cancel_ends_a_request_with_one_last_event(engine: EngineClient) -> None:
    task = await started(engine, request(max_tokens=900))
    await engine.cancel("a")
    events = await soon(task)
    assert_ends_once(events, FinishReason.CANCELLED)
    assert usage_of(events).completion_tokens == sum(len(event.tokens) for event in events)
    await assert_everything_is_free(engine)


async def test_cancelling_an_unknown_id_does_nothing(engine: EngineClient) -> None:
    await engine.cancel("nobody")
    assert_ends_once(await soon(run(engine, request())), FinishReason.LENGTH)


async def test_closing_an_iterator_cancels_within_a_step(engine: EngineClient) -> None:
    async with contextlib.aclosing(engine.submit(request(max_tokens=900))) as events:
        await soon(anext(events))
    await assert_everything_is_free(engine)
    assert (await soon(engine.stats())).finished == {"cancelled": 1}


async def test_cancelling_the_task_that_iterates_cancels_the_request(engine: EngineClient) -> None:
    task = await started(engine, request(max_tokens=900))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    await assert_everything_is_free(engine)


async def test_two_hundred_random_cancels_leak_no_cell_and_no_seq_id(engine: EngineClient) -> None:
    rng = random.Random(2024)

    async def one(i: int) -> None:
        its = request(str(i), max_tokens=rng.randint(1, 60), prompt="x" * rng.randint(1, 100))
        stop_after, by_id = rng.randint(0, 30), rng.random() < 0.5
        await asyncio.sleep(rng.random())
        async with contextlib.aclosing(engine.submit(its)) as events:
            n = 0
            async for event in events:
                n += 1
                if event.finish_reason is None and n > stop_after:
                    if not by_id:
                        return
                    await engine.cancel(its.id)

    await soon(asyncio.gather(*(one(i) for i in range(200))))
    await assert_everything_is_free(engine)
    finished = (await soon(engine.stats())).finished
    assert sum(finished.values()) == 200
    assert set(finished) == {"cancelled", "length"}


# --- ids -----------------------------------------------------------------------------------------------------------


async def test_an_id_in_use_is_refused_without_hurting_its_holder(engine: EngineClient) -> None:
    task = await started(engine, request(max_tokens=400))
    with pytest.raises(InvalidRequest, match="is already the id of a running request"):
        await soon(run(engine, request()))
    assert_ends_once(await soon(task), FinishReason.LENGTH)


async def test_an_id_may_be_used_again_after_its_request_has_ended(engine: EngineClient) -> None:
    for _ in range(3):
        assert_ends_once(await soon(run(engine, request())), FinishReason.LENGTH)


async def test_an_id_used_again_right_after_its_iterator_was_closed_gets_only_its_own_events(
    engine: EngineClient,
) -> None:
    async with contextlib.aclosing(engine.submit(request(max_tokens=900))) as first:
        await soon(anext(first))
    events = await soon(run(engine, request()))
    assert_ends_once(events, FinishReason.LENGTH)
    assert sum(len(event.tokens) for event in events) == 16


async def test_an_id_reused_while_its_last_events_are_unread_gets_its_own_events(engine: EngineClient) -> None:
    async with contextlib.aclosing(engine.submit(request(max_tokens=4))) as events:
        await soon(anext(events))
        while (await soon(engine.stats())).running:  # each answer takes a step
            pass
    assert_ends_once(await soon(run(engine, request())), FinishReason.LENGTH)


async def test_cancelling_a_request_that_is_still_being_tokenised_ends_it(engine: EngineClient) -> None:
    task = asyncio.create_task(run(engine, request(prompt="hello world " * 20_000)))
    await asyncio.sleep(0)
    await engine.cancel("a")
    with contextlib.suppress(InvalidRequest):  # far too long for the context, had it not been cancelled
        assert_ends_once(await soon(task), FinishReason.CANCELLED)
    await assert_everything_is_free(engine)


# --- the end -------------------------------------------------------------------------------------------------------


async def test_close_ends_running_and_waiting_requests_with_one_last_event(tiny_llama: Path) -> None:
    engine = LocalEngine(tiny_llama, **SETTINGS)
    await soon(engine.loaded())
    tasks = [await started(engine, request("first", max_tokens=900))]
    tasks += [asyncio.create_task(run(engine, request(str(i), max_tokens=900))) for i in range(20)]
    await asyncio.sleep(0.05)
    await soon(engine.close())
    for events in await soon(asyncio.gather(*tasks)):
        assert_ends_once(events, FinishReason.CANCELLED)
    assert engine.health().status == "closed"


@pytest.mark.parametrize("kind", [LocalEngine, EngineProcess])
async def test_close_ends_requests_in_preparation_and_refuses_queued_questions(
    kind: type[LocalEngine | EngineProcess], tiny_llama: Path
) -> None:
    engine = kind(tiny_llama, **SETTINGS)
    await soon(engine.loaded())
    questions = [asyncio.create_task(engine.tokenize("abc " * 100_000)) for _ in range(20)]
    params = [SamplingParams(json_schema={"type": "object", "required": [f"k{i}"]}) for i in range(20)]
    requests = [GenerationRequest(id=str(i), prompt="Hello", params=its) for i, its in enumerate(params)]
    streams = [asyncio.create_task(run(engine, its)) for its in requests]
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed, match="it is closed"):
        await soon(run(engine, request("late")))
    await soon(closing)
    answers = await soon(asyncio.gather(*questions, return_exceptions=True))
    assert {type(answer) for answer in answers} <= {list, EngineClosed}
    assert isinstance(answers[-1], EngineClosed)
    for events in await soon(asyncio.gather(*streams)):
        assert_ends_once(events, FinishReason.CANCELLED)


async def test_a_closed_engine_accepts_nothing_and_may_be_closed_again(tiny_llama: Path) -> None:
    async with LocalEngine(tiny_llama, **SETTINGS) as engine:
        pass
    with pytest.raises(EngineClosed, match="closed"):
        await soon(run(engine, request()))
    for use in (engine.stats, lambda: engine.cancel("a")):
        with pytest.raises(EngineClosed):
            await soon(use())
    await soon(engine.close())


async def test_stats_asked_for_while_closing_are_answered_or_refused(tiny_llama: Path) -> None:
    engine = LocalEngine(tiny_llama, **SETTINGS)
    await soon(engine.loaded())
    task = await started(engine, request(max_tokens=900))
    asking = [asyncio.create_task(engine.stats()) for _ in range(3)]
    await asyncio.gather(engine.close(), return_exceptions=True)
    with contextlib.suppress(EngineClosed):
        await soon(asyncio.gather(*asking))
    await soon(task)


async def test_a_failing_step_ends_every_stream_with_an_error_and_the_engine_says_why(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(5))
    step = EngineCore.step

    def failing(self: EngineCore) -> None:
        if next(steps, None) is None:
            raise RuntimeError("boom")
        step(self)

    engine = LocalEngine(tiny_llama, **SETTINGS)
    await soon(engine.loaded())
    monkeypatch.setattr(EngineCore, "step", failing)
    streams = await soon(asyncio.gather(*(run(engine, request(str(i))) for i in range(12))))
    for events in streams:
        assert_ends_once(events, FinishReason.ERROR)
        assert "boom" in (events[-1].error or "")
    assert engine.health().status == "failed"
    assert "boom" in (engine.health().error or "")
    with pytest.raises(EngineClosed, match="failed"):
        await soon(run(engine, request()))
    await soon(engine.close())
    assert engine.health().status == "failed"


async def test_statistics_that_the_engine_cannot_compute_are_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: EngineCore) -> None:
        raise RuntimeError("boom")

    async with LocalEngine(tiny_llama, **SETTINGS) as engine:
        monkeypatch.setattr(EngineCore, "stats", failing)
        with pytest.raises(EngineClosed, match="failed"):
            await soon(engine.stats())


CLOSE_WHILE_TOKENISING = """
import asyncio, sys
from cppbatch import GenerationRequest, LocalEngine, SamplingParams

async def run(stream):
    async for _ in stream:
        pass

async def main():
    async with LocalEngine(sys.argv[1], n_ctx=2048, n_parallel=1, n_threads=1) as engine:
        busy = SamplingParams(max_tokens=1900, ignore_eos=True)
        running = asyncio.ensure_future(run(engine.submit(GenerationRequest(id="b", prompt="x", params=busy))))
        stream = engine.submit(GenerationRequest(id="a", prompt="hello world " * 300_000))
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
    await asyncio.gather(task, running, return_exceptions=True)

asyncio.run(main())
"""


def test_closing_while_a_long_prompt_is_tokenised_does_not_crash(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", CLOSE_WHILE_TOKENISING, str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


async def test_a_full_queue_refuses_and_earlier_requests_finish(tiny_llama: Path) -> None:
    async with LocalEngine(tiny_llama, **{**SETTINGS, "n_parallel": 1, "max_queue": 1}) as engine:
        running = await started(engine, request("running", max_tokens=900))
        waiting = asyncio.create_task(run(engine, request("waiting")))
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull, match="the queue is full: 1 requests"):
            await soon(run(engine, request("refused")))
        assert (await soon(running))[-1].finish_reason is FinishReason.LENGTH
        assert (await soon(waiting))[-1].finish_reason is FinishReason.LENGTH
        again = await soon(run(engine, request("refused")))  # its id is free again
        assert again[-1].finish_reason is FinishReason.LENGTH
