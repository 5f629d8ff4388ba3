"""What every `EngineClient` promises: each request ends once, and nothing of it is left.

The thread and the worker process compute a tiny model. The workers of groups and the replicas of the Ray engine are
fake: they make a token of each request at every turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import pytest_asyncio

from cppbatch import (
    EngineConfig,
    EngineProcess,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    LocalEngine,
    SamplingParams,
)
from cppbatch.cluster.engines import supervisor
from cppbatch.cluster.engines.autoscaled import AutoscaledGroup
from cppbatch.cluster.engines.client import EngineClient, Health, WorkerState
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.cluster.rules import ScalingRule
from cppbatch.cluster.worker import worker as worker_module
from cppbatch.engine.core import EngineCore
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.errors import CppBatchError, EngineClosed, InvalidRequest, LlamaError, ModelError, QueueFull
from cppbatch.ray.replica.set import ReplicaSetStatus
from cppbatch.retries import Pauses
from tests.support import tiny_models
from tests.support.fake_replicas import FakeReplicas, settle
from tests.support.fake_workers import FakeWorker, fake_workers
from tests.support.listening import until
from tests.support.submitting import assert_ends_once, run, started, together

__all__ = ["fake_workers"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")
Make = Callable[..., EngineClient]

SETTINGS: dict[str, Any] = {"n_ctx": 16384, "n_parallel": 8, "n_batch": 64, "n_threads": 1, "flash_attn": "off"}
LONG = 3900
"""Tokens; no test waits for all of them."""

KINDS = ["local", "process", "group", "autoscaled", "ray"]
REAL = KINDS[:2]
REMOTE = pytest.mark.parametrize("kind", KINDS[1:], indirect=True)


def request(name: str = "a", prompt: str = "Hello", max_tokens: int = 16, **options: Any) -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(id=name, prompt=prompt, params=params, **options)


async def soon(awaitable: Awaitable[T], seconds: float = 60) -> T:
    return await asyncio.wait_for(awaitable, seconds)


def text_of(events: list[GenerationEvent]) -> str:
    return "".join(event.text for event in events)


async def assert_free(engine: EngineClient) -> None:
    """No request, cell or seq_id is in use, one step after the last request has ended or was cancelled."""
    await settle()
    for worker in await soon(engine.workers()):
        assert worker.in_flight == 0
        if stats := worker.stats:
            assert (stats.running, stats.waiting, stats.kv_cells_used, stats.swapped_bytes) == (0, 0, 0, 0)
            assert stats.seq_ids_free + stats.prefixes_in_cells == stats.seq_ids


# --- the engines ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> FakeReplicas:
    return FakeReplicas()


@pytest_asyncio.fixture(loop_scope="module", params=KINDS)
async def kind(request: pytest.FixtureRequest, cluster: FakeReplicas) -> AsyncIterator[str]:
    """A kind of engine. Fake workers and replicas compute during the test."""

    async def step() -> None:
        while True:
            for worker in FakeWorker.started:
                if not (worker.died or worker.ended):
                    worker.step()
            for replica in cluster.alive:
                replica.engine.step()
            await asyncio.sleep(0)

    FakeWorker.started = []
    stepping = asyncio.create_task(step()) if request.param not in REAL else None
    yield request.param
    if stepping:
        stepping.cancel()


@pytest.fixture
def make(kind: str, request: pytest.FixtureRequest, tiny_llama: Path, cluster: FakeReplicas) -> Make:
    """Makes an engine of the kind, which loads a model."""

    def fake_process(config: EngineConfig, number: int) -> EngineProcess:
        request.getfixturevalue("fake_workers")
        return EngineProcess(config, name=str(number))

    async def fits(_number: int) -> str | None:
        return None

    def make(path: Path = tiny_llama, **settings: Any) -> EngineClient:
        config = EngineConfig(str(path), **{**SETTINGS, **settings})
        if kind == "group":
            return EngineGroup([fake_process(config, i) for i in range(2)])
        if kind == "autoscaled":
            rule = ScalingRule(min_workers=2, max_workers=3, n_parallel=config.n_parallel, downscale_delay=1e9)
            return AutoscaledGroup(lambda i: fake_process(config, i), rule, shortage=fits, interval=1e9)
        if kind == "ray":
            return cluster.engine(**settings)
        return LocalEngine(config) if kind == "local" else EngineProcess(config)

    return make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local_engine(tiny_llama: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(tiny_llama, **SETTINGS) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process_engine(tiny_llama: Path) -> AsyncIterator[EngineProcess]:
    """One worker process for all tests that do not end it."""
    async with EngineProcess(tiny_llama, **SETTINGS) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(
    kind: str, make: Make, local_engine: LocalEngine, process_engine: EngineProcess
) -> AsyncIterator[EngineClient]:
    if kind in REAL:
        yield local_engine if kind == "local" else process_engine
    else:
        async with make() as engine:
            yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def small(kind: str, make: Make, process_engine: EngineProcess) -> AsyncIterator[EngineClient]:
    """An engine that computes one request at a time in each worker, while another one waits."""
    if kind == "process":  # this process limits the queue
        config = process_engine.config
        process_engine.config = msgspec.structs.replace(config, n_parallel=1, max_queue=1)
        yield process_engine
        process_engine.config = config
    else:
        async with make(n_parallel=1, max_queue=1) as engine:
            yield engine


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A `LocalEngine` stops half-way in loading until this event is set."""
    gate = threading.Event()

    def load(config: EngineConfig, *, progress: Callable[[float], bool], **hooks: Any) -> EngineCore:
        assert progress(0.5)
        assert gate.wait(20)
        return EngineCore(config, progress=progress, **hooks)

    monkeypatch.setattr(worker_module, "EngineCore", load)
    yield gate
    gate.set()


# --- from loading to closing ------------------------------------------------------------------------------------------


async def test_requests_are_accepted_from_the_end_of_loading_until_close_which_ends_all_of_them(
    make: Make, kind: str, gate: threading.Event
) -> None:
    engine = make()
    if kind == "local":
        await until(lambda: engine.health().progress == 0.5)
    assert engine.health().status == "loading"
    for use in (run(engine, request()), engine.check(request()), engine.tokenize("a")):
        with pytest.raises(EngineClosed, match="it is loading"):
            await use
    with pytest.raises(EngineClosed, match=r"loading|not loaded"):
        engine.info  # noqa: B018
    gate.set()
    await soon(engine.loaded())
    assert engine.health() == Health(status="ok", progress=1.0)
    assert engine.info.n_vocab > 0

    tasks = [await started(engine, request("first", max_tokens=LONG))]
    tasks += [asyncio.create_task(run(engine, request(str(i), max_tokens=LONG))) for i in range(40)]
    params = [SamplingParams(json_schema={"type": "object", "required": [f"k{i}"]}) for i in range(20)]
    in_preparation = [GenerationRequest(id=f"json {i}", prompt="Hello", params=its) for i, its in enumerate(params)]
    tasks += [asyncio.create_task(run(engine, its)) for its in in_preparation]
    questions: list[asyncio.Task[Any]] = [asyncio.create_task(engine.stats()) for _ in range(3)]
    questions += [asyncio.create_task(engine.tokenize("abc " * 20_000)) for _ in range(20)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await settle()
    for use in (run(engine, request("late")), engine.check(request()), engine.tokenize("a")):
        with pytest.raises(EngineClosed, match="it is closed"):
            await soon(use)
    await soon(closing)
    for events in await soon(asyncio.gather(*tasks)):
        assert_ends_once(events, FinishReason.CANCELLED)
    answers = await soon(asyncio.gather(*questions, return_exceptions=True))
    assert {type(answer) for answer in answers} <= {list, EngineStats, EngineClosed}
    assert engine.health().status == "closed"
    with pytest.raises(EngineClosed):
        await engine.stats()
    await soon(engine.close())


def worker_processes() -> set[int]:
    children = psutil.Process().children()
    return {child.pid for child in children if "cppbatch.cluster.worker.main" in child.cmdline()}


async def test_closing_while_loading_ends_the_worker_and_is_the_error_of_those_who_wait(
    make: Make, gate: threading.Event, cluster: FakeReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = worker_processes()
    engine = make()
    cluster.state = ReplicaSetStatus(status="starting", n_wanted=1)
    monkeypatch.setattr(FakeWorker, "receive", lambda worker: asyncio.Event().wait())
    loading = asyncio.create_task(engine.loaded())
    await asyncio.sleep(0.1)
    closing = asyncio.create_task(engine.close())
    await settle()
    gate.set()
    await soon(closing)
    with pytest.raises(CppBatchError, match=r"closed while loading|stopped"):
        await soon(loading)
    assert worker_processes() == before


async def test_an_error_of_loading_is_raised_and_kept(
    make: Make, kind: str, cluster: FakeReplicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.state = ReplicaSetStatus(status="failed", message="out of memory", error_kind="LlamaError")
    engine = make(tiny_models.not_gguf(tmp_path / "page.gguf"))
    monkeypatch.setattr(FakeWorker, "can_load", False)
    error, why = (ModelError, "page.gguf") if kind in REAL else (LlamaError, "out of memory")
    for _ in range(2):
        with pytest.raises(error, match=why):
            await soon(engine.loaded())
        assert engine.health().status == "failed"
        assert why in (engine.health().error or "")
    with pytest.raises(EngineClosed, match="it is failed"):
        await run(engine, request())
    with pytest.raises(error, match=why):
        async with engine:
            pytest.fail("it loaded")


# --- requests and questions -------------------------------------------------------------------------------------------


async def test_sixteen_requests_at_once_get_the_texts_they_get_alone(engine: EngineClient) -> None:
    requests = [request(str(i), prompt=f"{i} times " * i or "none") for i in range(16)]
    alone = [text_of(await soon(run(engine, its))) for its in requests]
    for events, text in zip(await together(engine, requests), alone, strict=True):
        assert_ends_once(events, FinishReason.LENGTH, n_tokens=16)
        assert text_of(events) == text
    await assert_free(engine)


async def test_a_bad_request_is_refused_alone(engine: EngineClient) -> None:
    bad = request("bad", prompt="invalid, as it is too long " * 1000)
    running = asyncio.create_task(run(engine, request()))
    for use in (run(engine, bad), engine.check(bad)):
        with pytest.raises(InvalidRequest) as refused:
            await soon(use)
        assert refused.value.field == "prompt"
    assert_ends_once(await soon(running), FinishReason.LENGTH)
    await soon(engine.check(request()))
    await assert_free(engine)


@REMOTE
async def test_what_cannot_be_sent_to_another_process_is_refused(engine: EngineClient) -> None:
    params = SamplingParams(logits_processor=lambda tokens, logits: None)
    with_function = GenerationRequest(id="a", prompt="a", params=params)
    with_half_a_letter = request(prompt="half \ud800 of one")
    for bad, why in ((with_function, "use LocalEngine"), (with_half_a_letter, "an unpaired surrogate")):
        for use in (run(engine, bad), engine.check(bad)):
            with pytest.raises(InvalidRequest, match=why):
                await soon(use)
    with pytest.raises(InvalidRequest, match="an unpaired surrogate"):
        await soon(engine.tokenize("half \ud800 of one"))
    assert_ends_once(await soon(run(engine, request())), FinishReason.LENGTH)


async def test_a_full_queue_refuses_with_a_retry_after_and_earlier_requests_finish(
    small: EngineClient, kind: str
) -> None:
    n_workers = 2 if kind in ("group", "autoscaled") else 1
    running = [request(f"running {i}", f"{i}", LONG) for i in range(n_workers)]
    waiting = [request(f"waiting {i}", f"{i}", report_acceptance=True) for i in range(n_workers)]
    tasks = [await started(small, its) for its in [*running, *waiting]]
    with pytest.raises(QueueFull, match="the queue is full: 1 requests") as refused:
        await soon(run(small, request("refused")))
    assert 1 <= refused.value.retry_after <= 60
    for its in running:
        await small.cancel(its.id)
    for events in await soon(asyncio.gather(*tasks[n_workers:])):
        assert_ends_once(events, FinishReason.LENGTH, n_tokens=16)
    assert_ends_once(await soon(run(small, request("refused"))), FinishReason.LENGTH)  # its id is free


async def test_an_idle_engine_takes_as_many_requests_at_once_as_it_computes_and_queues(make: Make) -> None:
    async with make(n_parallel=8, max_queue=1) as engine:
        for events in await together(engine, [request(str(i)) for i in range(9)]):
            assert_ends_once(events, FinishReason.LENGTH, n_tokens=16)


async def test_a_text_has_the_tokens_whose_ids_have_its_pieces(engine: EngineClient) -> None:
    pieces = await soon(engine.tokenize("abba", add_special=False))
    assert [piece.piece for piece in pieces] == [b"a", b"b", b"b", b"a"]
    assert await soon(engine.tokenize([piece.id for piece in pieces])) == pieces


async def test_a_slot_that_a_request_has_named_is_erased_and_another_one_cannot_be_saved(
    engine: EngineClient, tmp_path: Path
) -> None:
    await soon(run(engine, request(id_slot=0)))
    assert (await soon(engine.slot_action("erase", 0))).n_tokens > 0
    with pytest.raises(InvalidRequest, match="id_slot"):
        await soon(engine.slot_action("save", 5, str(tmp_path / "slot")))


@REMOTE
async def test_requests_continue_when_their_workers_die_and_those_that_arrive_meanwhile_wait_or_are_cancelled(
    engine: EngineClient, cluster: FakeReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_PAUSES", Pauses(0.1, 30.0))
    requests = [request(str(i), prompt=f"{i} times", max_tokens=100) for i in range(6)]
    undisturbed = [text_of(events) for events in await together(engine, requests)]
    tasks = [await started(engine, its) for its in requests]
    kill_workers(await engine.workers(), cluster)
    while any(worker.pid is not None for worker in await engine.workers()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    waiting, cancelled = (asyncio.create_task(run(engine, request(name))) for name in ("waiting", "cancelled"))
    await settle()
    await engine.cancel("cancelled")
    assert_ends_once(await soon(cancelled), FinishReason.CANCELLED, n_tokens=0)
    assert not waiting.done()
    cluster.add()
    for events, text in zip(await soon(asyncio.gather(*tasks)), undisturbed, strict=True):
        assert_ends_once(events, FinishReason.LENGTH, n_tokens=100)
        assert text_of(events) == text
    assert_ends_once(await soon(waiting), FinishReason.LENGTH, n_tokens=16)
    await assert_free(engine)


def kill_workers(workers: list[WorkerState], cluster: FakeReplicas) -> None:
    for replica in cluster.replicas:
        replica.kill()
    for fake in FakeWorker.started:
        fake.die()
    if not FakeWorker.started:
        for worker in workers:
            if worker.pid:
                os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", REAL, indirect=True)
async def test_update_request_appends_tokens_to_a_running_text(engine: LocalEngine | EngineProcess) -> None:
    """Every given token is in the text, in one piece, and counts as generated; the text continues to its maximum."""
    task = await started(engine, request(max_tokens=900))
    assert await soon(engine.update_request("a", [7, 8, 9, 7]))
    with pytest.raises(InvalidRequest, match="tokens: has 4000 ids"):
        await soon(engine.update_request("a", [7] * 4000))
    assert not await soon(engine.update_request("nobody", [7]))
    events = await soon(task)
    assert_ends_once(events, FinishReason.LENGTH, n_tokens=900)
    tokens = [token for event in events for token in event.tokens]
    assert any(tokens[i : i + 4] == [7, 8, 9, 7] for i in range(len(tokens)))
    assert events[-1].usage
    assert events[-1].usage.completion_tokens == 900
    assert not await soon(engine.update_request("a", [7]))
    await assert_free(engine)


CALLS: list[Callable[[EngineClient], Any]] = [
    lambda engine: anext(engine.submit(request())),
    lambda engine: engine.check(request()),
    lambda engine: engine.tokenize("a"),
    lambda engine: engine.chat("a"),
    lambda engine: engine.slot_action("erase", 0),
    lambda engine: engine.cancel("a"),
    lambda engine: engine.stats(),
    lambda engine: engine.workers(),
    lambda engine: engine.live(),
    lambda engine: engine.loaded(),
]


async def test_a_call_from_another_event_loop_raises_at_once(engine: EngineClient) -> None:
    async def call_all() -> None:
        for call in CALLS:
            with pytest.raises(EngineClosed, match="another event loop, which is still open: await it there"):
                await asyncio.wait_for(call(engine), 5)

    await asyncio.to_thread(lambda: asyncio.run(call_all()))


# --- a bug in the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local"], indirect=True)
async def test_a_failing_step_ends_every_stream_with_an_error_and_the_engine_says_why(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker process ends instead, and the next one continues its requests."""
    steps, step = iter(range(5)), EngineCore.step

    def failing(core: EngineCore) -> None:
        if next(steps, None) is None:
            raise RuntimeError("boom")
        step(core)

    engine = make()
    await engine.loaded()
    monkeypatch.setattr(EngineCore, "step", failing)
    for events in await together(engine, [request(str(i)) for i in range(12)]):
        assert_ends_once(events, FinishReason.ERROR)
        assert "boom" in (events[-1].error or "")
    assert engine.health().status == "failed"
    assert "boom" in (engine.health().error or "")
    for use in (run(engine, request("late")), engine.check(request()), engine.stats()):
        with pytest.raises(EngineClosed, match="failed"):
            await soon(use)
    await engine.close()
    assert engine.health().status == "failed"


@pytest.mark.parametrize("kind", ["local"], indirect=True)
async def test_statistics_that_the_engine_cannot_compute_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(core: EngineCore) -> None:
        raise RuntimeError("boom")

    async with make() as engine:
        monkeypatch.setattr(EngineCore, "stats", failing)
        with pytest.raises(EngineClosed, match="failed"):
            await soon(engine.stats())


# --- cancelling -------------------------------------------------------------------------------------------------------


async def test_a_cancelled_request_ends_with_one_last_event_and_unknown_ids_are_ignored(
    engine: EngineClient, kind: str
) -> None:
    other = asyncio.create_task(run(engine, request("other")))
    task = await started(engine, request(max_tokens=LONG))
    await engine.cancel("nobody")
    await engine.cancel("a")
    events = await soon(task)
    assert_ends_once(events, FinishReason.CANCELLED)
    if kind in REAL:
        assert events[-1].usage
        assert events[-1].usage.completion_tokens == sum(len(event.tokens) for event in events)
    assert_ends_once(await soon(other), FinishReason.LENGTH)
    await assert_free(engine)


async def test_closing_an_iterator_cancels_within_a_step_and_so_does_cancelling_its_task(engine: EngineClient) -> None:
    async with contextlib.aclosing(engine.submit(request(max_tokens=LONG))) as events:
        await soon(anext(events))
    await assert_free(engine)
    task = await started(engine, request(max_tokens=LONG))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    await assert_free(engine)


async def test_a_request_that_is_cancelled_in_preparation_ends(engine: EngineClient) -> None:
    task = asyncio.create_task(run(engine, request(prompt="hello world " * 20_000, max_tokens=LONG)))
    await asyncio.sleep(0)
    await engine.cancel("a")
    with contextlib.suppress(InvalidRequest):  # far too long for the context, had it not been cancelled
        assert_ends_once(await soon(task), FinishReason.CANCELLED)
    await assert_free(engine)


async def test_two_hundred_random_cancels_leak_nothing(engine: EngineClient, kind: str) -> None:
    rng = random.Random(2024)
    ends: list[FinishReason | None] = []
    n_before = await n_finished(engine)

    async def one(i: int) -> None:
        its = request(str(i), max_tokens=rng.randint(1, 60), prompt="x" * rng.randint(1, 100))
        stop_after, by_id = rng.randint(0, 30), rng.random() < 0.5
        await asyncio.sleep(rng.random() / 2)
        async with contextlib.aclosing(engine.submit(its)) as events:
            n = 0
            async for event in events:
                n += 1
                ends.append(event.finish_reason)
                if event.finish_reason is None and n > stop_after:
                    if not by_id:
                        return
                    await engine.cancel(its.id)

    await soon(asyncio.gather(*(one(i) for i in range(200))))
    assert set(ends) == {None, FinishReason.CANCELLED, FinishReason.LENGTH}
    await assert_free(engine)
    if kind in REAL:
        assert await n_finished(engine) - n_before == 200


async def n_finished(engine: EngineClient) -> int:
    return sum(sum(worker.stats.finished.values()) for worker in await soon(engine.workers()) if worker.stats)


# --- ids --------------------------------------------------------------------------------------------------------------


async def test_an_id_in_use_is_refused_without_hurting_its_holder(engine: EngineClient) -> None:
    task = await started(engine, request(max_tokens=400))
    with pytest.raises(InvalidRequest, match="'a' is already the id of a running request"):
        await soon(run(engine, request()))
    assert_ends_once(await soon(task), FinishReason.LENGTH, n_tokens=400)


async def test_an_id_used_again_after_its_iterator_was_closed_gets_only_its_own_events(engine: EngineClient) -> None:
    for n_tokens in (LONG, 4):
        async with contextlib.aclosing(engine.submit(request(max_tokens=n_tokens))) as first:
            await soon(anext(first))
            if n_tokens == 4:
                await until_computed(engine)  # its last events are unread
        assert_ends_once(await soon(run(engine, request())), FinishReason.LENGTH, n_tokens=16)


async def until_computed(engine: EngineClient) -> None:
    while True:
        workers = await soon(engine.workers())
        if not any(worker.stats.running if worker.stats else worker.in_flight for worker in workers):
            return
        await asyncio.sleep(0)
