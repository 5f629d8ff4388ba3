"""StepLoop and OutputThread: events are sent in order by a separate thread, and none is lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from cppbatch import GenerationEvent, SamplingParams
from cppbatch.cluster.worker.threads import StepLoop
from tests.support.fakes import context_of, fake_engine, reference, tokens_of

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def run(loop: StepLoop, engine: Any, done: threading.Event) -> threading.Thread:
    """Runs the loop on a thread until `done` is set."""
    thread = threading.Thread(target=loop.run, args=(engine,))
    thread.start()
    assert done.wait(8)
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
    stepping = run(StepLoop(send), engine.core, done)
    assert len(threads) == 1
    assert stepping.ident not in threads
    for i, name in enumerate(names):
        tokens = tokens_of(events, name)
        assert tokens == reference([i, i + 1], PARAMS)[0]


def served(max_wait_ms: float, n: int, gap_s: float) -> tuple[list[int], float]:
    """`n` requests, one each `gap_s`, to an idle loop of four: rows of each step, seconds to the last end.

    Fails where that takes 8 seconds or more."""
    done = threading.Event()
    ended: list[str] = []

    def send(new: list[GenerationEvent]) -> None:
        ended.extend(event.request_id for event in new if event.finish_reason)
        if len(ended) == n:
            done.set()

    engine = fake_engine(n_parallel=4, max_wait_ms=max_wait_ms)
    loop = StepLoop(send)
    began = time.perf_counter()

    def add() -> None:
        for i in range(n):
            loop.post(lambda _, i=i: engine.add_request([i + 1, i + 2], PARAMS))  # type: ignore[misc]
            time.sleep(gap_s)

    adding = threading.Thread(target=add)
    adding.start()
    run(loop, engine.core, done)
    adding.join()
    return [len(step) for step in context_of(engine).steps], time.perf_counter() - began


def test_an_idle_loop_collects_requests_for_the_window() -> None:
    steps, seconds = served(300, n=3, gap_s=0.02)
    assert steps[0] == 3
    assert seconds >= 0.3


def test_a_full_batch_does_not_wait_for_the_end_of_the_window() -> None:
    steps, _ = served(10_000, n=4, gap_s=0.02)
    assert steps[0] == 4


def test_without_a_window_the_first_request_is_computed_at_once() -> None:
    steps, _ = served(0, n=2, gap_s=0.2)
    assert steps[0] == 1


def test_a_request_that_is_cancelled_in_the_window_ends_at_once() -> None:
    done = threading.Event()
    loop, engine = StepLoop(lambda new: done.set()), fake_engine(n_parallel=4, max_wait_ms=10_000)
    name = engine.add_request([1, 2], PARAMS)
    loop.post(lambda engine: engine.cancel(name))
    run(loop, engine.core, done)  # fails after 8 seconds


def test_an_error_of_the_callback_ends_the_loop() -> None:
    def broken(new: list[GenerationEvent]) -> None:
        raise RuntimeError("boom")

    engine = fake_engine()
    engine.add_request([1, 2], PARAMS)
    with pytest.raises(RuntimeError, match="boom"):
        StepLoop(broken).run(engine.core)


def test_an_error_of_the_callback_after_the_last_step_is_raised_too() -> None:
    def broken(new: list[GenerationEvent]) -> None:
        loop.stop()
        time.sleep(0.2)  # the loop has run its last command and waits for this callback
        raise RuntimeError("boom")

    loop, engine = StepLoop(broken), fake_engine()
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=1))
    with pytest.raises(RuntimeError, match="boom"):
        loop.run(engine.core)


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
    run(StepLoop(slow), engine.core, done)
    assert steps_at_first[0] < 10
    assert sum(len(event.tokens) for event in told) == 30
