"""StepLoop and OutputThread: events are sent in order by a thread of their own, and none is lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from cppbatch import GenerationEvent, SamplingParams
from cppbatch.cluster.engine_threads import StepLoop
from tests.fakes import fake_engine, reference, tokens_of

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def run(loop: StepLoop, engine: Any, done: threading.Event) -> threading.Thread:
    """Runs the loop on a thread until `done` is set."""
    thread = threading.Thread(target=loop.run, args=(engine,))
    thread.start()
    assert done.wait(10)
    loop.stop()
    thread.join(10)
    assert not thread.is_alive()
    return thread


def test_events_are_sent_in_order_by_another_thread_than_the_one_that_steps() -> None:
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
        tokens = tokens_of(events, name)
        assert tokens == reference([i, i + 1], PARAMS)[0]


def test_an_error_of_the_callback_ends_the_loop() -> None:
    def broken(new: list[GenerationEvent]) -> None:
        raise RuntimeError("boom")

    engine = fake_engine()
    engine.add_request([1, 2], PARAMS)
    with pytest.raises(RuntimeError, match="boom"):
        StepLoop(broken).run(engine)


def test_an_error_of_the_callback_after_the_last_step_is_raised_too() -> None:
    def broken(new: list[GenerationEvent]) -> None:
        loop.stop()
        time.sleep(0.2)  # the loop has run its last command and waits for this callback
        raise RuntimeError("boom")

    loop, engine = StepLoop(broken), fake_engine()
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=1))
    with pytest.raises(RuntimeError, match="boom"):
        loop.run(engine)


def test_a_slow_callback_delays_steps_instead_of_filling_memory() -> None:
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
