"""An engine that is dropped instead of closed is freed with the last reference, and says so, as a file does."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, EngineConfig, EngineProcess, GenerationRequest, LocalEngine
from cppbatch.cluster.engines import local
from cppbatch.cluster.engines.autoscaled import AutoscaledGroup
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.cluster.rules import ScalingRule
from cppbatch.engine.runtime import Runtime
from cppbatch.errors import ConfigError, EngineClosed
from cppbatch.llama.owned import Owned
from tests.support.fake_workers import FakeWorker, fake_workers
from tests.support.fakes import context_of, fake_engine, greedy
from tests.support.listening import until

__all__ = ["fake_workers"]

CONFIG = EngineConfig("model.gguf")


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Only the count of references frees anything."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


LENT: list[BatchInferenceEngine] = []
"""Engines that would close their runtimes if they were dropped."""


def lent_runtime() -> Runtime:
    LENT.append(fake_engine())
    return LENT[-1].core.runtime


def local_engine() -> LocalEngine:
    return LocalEngine(CONFIG, runtime=lent_runtime())


def thread_of(engine: LocalEngine) -> local._EngineThread:
    return engine._thread


# --- BatchInferenceEngine -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_gc")
def test_an_engine_is_freed_with_its_last_reference_and_warns() -> None:
    engine = fake_engine(path="some.gguf")
    context, other = context_of(engine), engine
    engine.generate([[1, 2]], greedy(4))
    del engine
    assert not context.is_closed
    with pytest.warns(ResourceWarning, match=r"unclosed BatchInferenceEngine of .*gguf; use `with`, or call `close`"):
        del other
    assert context.is_closed


@pytest.mark.usefixtures("without_gc", "no_warnings")
def test_a_closed_engine_is_dropped_without_a_word() -> None:
    with fake_engine() as engine:
        engine.generate([[1, 2]], greedy(4))
    del engine


@pytest.mark.usefixtures("without_gc")
def test_an_iterator_keeps_its_engine_open_until_it_ends() -> None:
    engine = fake_engine()
    context = context_of(engine)
    events, results = engine.stream([1, 2], greedy(6)), engine.map([[1], [2]], greedy(3))
    next(events)
    del engine
    assert len(list(results)) == 2
    assert not context.is_closed
    with pytest.warns(ResourceWarning, match="unclosed"):
        assert list(events)[-1].finish_reason
    assert context.is_closed


@pytest.mark.usefixtures("without_gc")
def test_a_dropped_iterator_and_its_engine_are_freed_together() -> None:
    engine = fake_engine()
    context, events = context_of(engine), engine.stream([1, 2], greedy(20))
    next(events)
    del engine
    with pytest.warns(ResourceWarning, match="unclosed"):
        del events
    assert context.is_closed


class Notebook:
    """Refers to its engine, whose unfinished request refers to it."""

    def __init__(self, engine: BatchInferenceEngine) -> None:
        self.engine = engine
        engine.add_request([1, 2], greedy(50, logits_processor=self.process))
        self.events = engine.stream([3], greedy(50))
        next(self.events)

    def process(self, tokens: Any, logits: Any) -> None:
        assert self.engine


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_engine_in_a_reference_cycle_with_its_own_requests_is_freed_by_garbage_collection() -> None:
    notebook = Notebook(fake_engine())
    context = context_of(notebook.engine)
    del notebook
    gc.collect()
    assert context.is_closed


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_garbage_collection_in_the_middle_of_a_step_frees_other_engines() -> None:
    notebook = Notebook(fake_engine())
    context = context_of(notebook.engine)
    del notebook

    def collect(tokens: Any, logits: Any) -> None:
        gc.collect()

    with fake_engine() as engine:
        engine.generate([[1, 2]], greedy(2, logits_processor=collect))
        assert context.is_closed


def test_an_engine_that_cannot_be_made_frees_its_model() -> None:
    runtime = lent_runtime()

    def fail(*_arguments: Any, **_settings: Any) -> Any:
        raise ConfigError("no such folder")

    with pytest.raises(ConfigError, match="no such folder"):
        BatchInferenceEngine(CONFIG, runtime=runtime, policy=fail)
    assert context_of(LENT[-1]).is_closed


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_an_engine_is_freed_even_if_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    engine = fake_engine()
    context = context_of(engine)
    del engine
    assert context.is_closed
    assert [type(each.exc_value) for each in unraisable] == [ResourceWarning]


# --- what llama.cpp has allocated -----------------------------------------------------------------------------------


class Holder:
    """In a reference cycle with another one."""

    def __init__(self, owned: Owned) -> None:
        self.owned, self.other = owned, self


def test_what_is_needed_is_freed_later_in_reference_cycles_too() -> None:
    freed: list[str] = []
    model = Owned("model", freed.append)
    contexts = [Owned(f"context {i}", freed.append, model) for i in range(3)]
    for owned in (model, *contexts):
        Holder(owned)
    del model, contexts, owned
    assert not freed
    gc.collect()
    gc.collect()
    assert sorted(freed[:3]) == ["context 0", "context 1", "context 2"]
    assert freed[3:] == ["model"]


def test_a_closed_pointer_is_freed_once_and_gone() -> None:
    freed: list[str] = []
    owned = Owned("pointer", freed.append)
    assert owned.pointer == "pointer"
    owned.close()
    owned.close()
    assert owned.pointer is None
    del owned
    assert freed == ["pointer"]


def test_a_fork_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    engine = fake_engine()
    context, owned = context_of(engine), Owned("pointer", freed.append)
    monkeypatch.setattr("os.getpid", lambda: 1)
    del engine, owned
    assert not context.is_closed
    assert not freed


# --- asyncio --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_gc")
async def test_a_local_engine_ends_its_thread_with_its_last_reference_and_warns() -> None:
    engine = local_engine()
    await engine.loaded()
    thread = thread_of(engine)
    async for _ in engine.submit(GenerationRequest(id="a", prompt=[1, 2], params=greedy(3))):
        pass
    assert thread.must_stop
    with pytest.warns(ResourceWarning, match="unclosed LocalEngine of model.gguf"):
        del engine
    await asyncio.to_thread(thread._thread.join, 10)
    assert not thread._thread.is_alive()
    assert thread.worker
    assert thread.worker.engine.is_closed


@pytest.mark.usefixtures("no_warnings")
async def test_a_closed_local_engine_is_dropped_without_a_word() -> None:
    async with local_engine() as engine:
        pass
    del engine


async def test_a_local_engine_is_kept_by_what_iterates_it() -> None:
    engine = local_engine()
    await engine.loaded()
    thread, dropped = thread_of(engine), weakref.ref(engine)
    events = engine.submit(GenerationRequest(id="a", prompt=[1, 2], params=greedy(30)))
    taken = [await anext(events)]
    del engine
    assert dropped()
    with pytest.warns(ResourceWarning, match="unclosed"):
        taken += [event async for event in events]
    assert taken[-1].finish_reason
    await asyncio.to_thread(thread._thread.join, 10)


async def leave_open() -> LocalEngine:
    engine = local_engine()
    await engine.loaded()
    return engine


def test_a_local_engine_ends_after_its_event_loop() -> None:
    engine = asyncio.run(leave_open())
    thread = thread_of(engine)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del engine
    thread._thread.join(10)
    assert not thread._thread.is_alive()


@pytest.mark.usefixtures("without_gc")
async def test_the_worker_of_a_dropped_engine_is_killed_and_the_engine_warns(
    fake_workers: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineProcess(CONFIG)
    await engine.loaded()
    with pytest.warns(ResourceWarning, match="unclosed EngineProcess of model.gguf"):
        del engine
    assert fake_workers[0].was_killed
    await until(lambda: fake_workers[0].ended)
    await asyncio.sleep(0.01)
    assert len(fake_workers) == 1
    assert not caplog.records


@pytest.mark.usefixtures("no_warnings")
async def test_a_closed_engine_process_is_dropped_without_a_word(fake_workers: list[FakeWorker]) -> None:
    async with EngineProcess(CONFIG) as engine:
        pass
    del engine
    assert fake_workers[0].ended


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_dropped_groups_end_their_workers(fake_workers: list[FakeWorker]) -> None:
    async def no_shortage(number: int) -> str | None:
        return None

    rule = ScalingRule(min_workers=2, max_workers=3, n_parallel=4, downscale_delay=9)
    scaled = AutoscaledGroup(lambda i: EngineProcess(CONFIG, name=str(i)), rule, shortage=no_shortage, interval=0.01)
    fixed = EngineGroup([EngineProcess(CONFIG), EngineProcess(CONFIG)])
    await scaled.loaded()
    await fixed.loaded()
    await asyncio.sleep(0.03)
    del scaled, fixed
    gc.collect()
    await until(lambda: all(worker.was_killed and worker.ended for worker in fake_workers))
    assert len(fake_workers) == 4


def test_a_call_after_the_end_of_the_engines_event_loop_raises_at_once() -> None:
    async def call() -> None:
        with pytest.raises(EngineClosed, match="belongs to another event loop, which is closed: create the engine in"):
            await asyncio.wait_for(engine.stats(), 5)
        await engine.close()

    engine = asyncio.run(leave_open())
    asyncio.run(call())
    assert engine.health().status == "closed"
