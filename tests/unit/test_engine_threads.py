"""The loop that steps an engine: texts are told by a thread of their own, in order, and none is lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from cppbatch import GenerationEvent, SamplingParams
from cppbatch.cluster.engine_threads import StepLoop
from tests.fakes import fake_engine, reference

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def run(loop: StepLoop, engine: Any, done: threading.Event) -> threading.Thread:
    """Runs it until `done`, which is looked at from outside: the engine's thread is busy."""
    thread = threading.Thread(target=loop.run, args=(engine,))
    thread.start()
    assert done.wait(10)
    loop.stop()
    thread.join(10)
    assert not thread.is_alive()
    return thread


def test_everything_is_told_in_order_by_another_thread_than_steps() -> None:
    events: list[GenerationEvent] = []
    threads, done = set(), threading.Event()

    def send(new: list[GenerationEvent]) -> None:
        threads.add(threading.get_ident())
        events.extend(new)
        if sum(event.finish_reason is not None for event in events) == 5:
            done.set()

    engine = fake_engine()
    names = [engine.add_request([i, i + 1], PARAMS) for i in range(5)]
    stepping = run(StepLoop(send), engine, done)
    assert len(threads) == 1
    assert stepping.ident not in threads
    for i, name in enumerate(names):
        tokens = [token for event in events if event.request_id == name for token in event.tokens]
        assert tokens == reference([i, i + 1], PARAMS)[0]


def test_what_cannot_be_told_ends_the_loop_with_that_error() -> None:
    def broken(new: list[GenerationEvent]) -> None:
        raise RuntimeError("boom")

    engine = fake_engine()
    engine.add_request([1, 2], PARAMS)
    with pytest.raises(RuntimeError, match="boom"):
        StepLoop(broken).run(engine)


def test_what_cannot_be_told_at_the_very_end_is_an_error_too() -> None:
    def broken(new: list[GenerationEvent]) -> None:
        loop.stop()
        time.sleep(0.2)  # the loop has done its last command, and waits for this
        raise RuntimeError("boom")

    loop, engine = StepLoop(broken), fake_engine()
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=1))
    with pytest.raises(RuntimeError, match="boom"):
        loop.run(engine)


def test_a_slow_reader_of_events_holds_the_steps_up_rather_than_memory() -> None:
    gate, done, told = threading.Event(), threading.Event(), []

    def slow(new: list[GenerationEvent]) -> None:
        gate.wait(10)
        told.extend(new)
        if any(event.finish_reason for event in new):
            done.set()

    engine = fake_engine()
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    threading.Timer(0.3, gate.set).start()
    steps_at_first: list[int] = []
    threading.Timer(0.2, lambda: steps_at_first.append(engine.stats().steps)).start()
    run(StepLoop(slow), engine, done)
    assert steps_at_first[0] < 10
    assert sum(len(event.tokens) for event in told) == 30
