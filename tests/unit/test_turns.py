"""Several threads call one engine: their requests share batches, and no thread waits longer than a step or two."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason, GenerationEvent
from cppbatch.errors import EngineClosed
from cppbatch.llama import Batch
from tests.support.fakes import context_of, fake_engine, greedy, reference

LONG, SHORT = greedy(200, ignore_eos=True), greedy(2, ignore_eos=True)


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def slow(engine: BatchInferenceEngine, seconds: float = 0.001) -> BatchInferenceEngine:
    """Each of its steps takes this long, without the GIL, as in llama.cpp."""
    decode = context_of(engine).decode

    def sleep_and_decode(batch: Batch) -> None:
        time.sleep(seconds)
        decode(batch)

    context_of(engine).decode = sleep_and_decode  # type: ignore[method-assign]
    return engine


def nothing_is_left(engine: BatchInferenceEngine) -> bool:
    engine.clear_prefix_cache()
    engine.core.kv.check()
    return not engine.has_work and not engine.core.outputs._inboxes and context_of(engine).n_used == 0


def test_threads_get_the_texts_they_get_alone(threads: ThreadPoolExecutor) -> None:
    engine = slow(fake_engine(n_ctx=256), 0.0001)
    params = greedy(9)

    def call(i: int) -> None:
        prompts = [[i % 50, 1], [i % 50, 2]]
        for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
            assert (result.tokens, result.text, result.finish_reason) == reference(prompt, params)

    list(threads.map(call, range(200)))
    assert nothing_is_left(engine)


def test_requests_of_threads_share_batches(threads: ThreadPoolExecutor) -> None:
    engine = slow(fake_engine(n_ctx=1024))
    list(threads.map(lambda i: engine.generate([[i]], greedy(20, ignore_eos=True)), range(8)))
    assert max(map(len, context_of(engine).steps)) == engine.config.n_parallel


def test_every_way_to_call_works_beside_the_others(threads: ThreadPoolExecutor) -> None:
    engine = slow(fake_engine(n_ctx=256), 0.0001)
    prompt, params = [1, 2, 3], greedy(12)
    expected = reference(prompt, params)[0]

    def stream() -> list[int]:
        return [token for event in engine.stream(prompt, params) for token in event.tokens]

    def mapped() -> list[int]:
        results = [result.completion.tokens for result in engine.map([prompt] * 20, params)]
        assert results == [results[0]] * 20
        return results[0]

    calls: list[Callable[[], list[int]]] = [stream, mapped, lambda: engine.generate([prompt], params)[0].tokens]
    running = [threads.submit(call) for call in calls * 10]
    assert [future.result() for future in running] == [expected] * 30
    assert nothing_is_left(engine)


def test_a_short_call_does_not_wait_for_a_long_one(threads: ThreadPoolExecutor) -> None:
    engine = slow(fake_engine(n_ctx=1024))
    long = threads.submit(engine.generate, [[1]], LONG)
    while not context_of(engine).steps:
        time.sleep(0.001)
    n_before = len(context_of(engine).steps)
    engine.generate([[2]], SHORT)
    assert len(context_of(engine).steps) - n_before <= 6
    assert not long.done()


def test_an_unread_stream_delays_no_other_request(threads: ThreadPoolExecutor) -> None:
    engine = fake_engine(n_ctx=1024)
    stream = engine.stream([1], LONG)
    first = next(stream)
    assert len(threads.submit(engine.generate, [[2]], SHORT).result(timeout=10)[0].tokens) == 2
    tokens = [*first.tokens, *(token for event in stream for token in event.tokens)]
    assert tokens == reference([1], LONG)[0]


def test_garbage_collection_in_a_step_cancels_a_stream_after_it() -> None:
    """A stream in a circle of references is closed wherever Python collects it, also within a step."""
    engine = fake_engine(n_ctx=256)
    decode, n_streams = context_of(engine).decode, 0

    def collect_and_decode(batch: Batch) -> None:
        gc.collect()
        decode(batch)

    def abandon_a_stream() -> None:
        circle: list[Any] = [engine.stream([7], LONG)]
        next(circle[0])
        circle.append(circle)

    gc.disable()
    gc.freeze()  # it need not look at what other tests have left
    try:
        for prompt in ([1], [2], [3]):
            abandon_a_stream()
            n_streams += engine.stats().running
            context_of(engine).decode = collect_and_decode  # type: ignore[method-assign]
            assert engine.generate([prompt], SHORT)[0].tokens == reference(prompt, SHORT)[0]
            context_of(engine).decode = decode  # type: ignore[method-assign]
    finally:
        gc.unfreeze()
        gc.enable()
    assert n_streams == 3
    assert nothing_is_left(engine)


def test_a_stream_that_is_closed_within_a_step_is_cancelled_after_it() -> None:
    engine = fake_engine(n_ctx=256)
    stream = engine.stream([7], LONG)
    next(stream)
    engine.turns.run(stream.close)
    assert nothing_is_left(engine)


def test_a_function_that_a_step_calls_cannot_generate_or_change_sequences() -> None:
    engine = fake_engine(n_ctx=256)
    stream = engine.stream([7], LONG)
    with pytest.raises(RuntimeError, match="cannot use or close the same engine"):
        engine.turns.run(lambda: engine.generate([[1]], SHORT))
    with pytest.raises(RuntimeError, match="cannot use or close the same engine"):
        engine.turns.run(lambda: next(stream))
    for call in (
        engine.step,
        engine.clear_prefix_cache,
        lambda: engine.cancel("x"),
        lambda: engine.update_request("x", []),
    ):
        with pytest.raises(RuntimeError, match="cannot use or close the same engine"):
            engine.turns.run(call)
    assert engine.generate([[1]], SHORT)[0].tokens == reference([1], SHORT)[0]
    assert nothing_is_left(engine)


def test_step_in_one_thread_and_generate_in_another(threads: ThreadPoolExecutor) -> None:
    engine = slow(fake_engine(n_ctx=1024), 0.0001)
    other = threads.submit(lambda: [engine.generate([[2]], greedy(5)) for _ in range(20)])
    request_id = engine.add_request([1], LONG)
    events: list[GenerationEvent] = []
    while not events or not events[-1].finish_reason:
        events += engine.step()
    assert {event.request_id for event in events} == {request_id}
    assert [token for event in events for token in event.tokens] == reference([1], LONG)[0]
    assert [result.tokens for (result,) in other.result()] == [reference([2], greedy(5))[0]] * 20


def test_closing_ends_the_calls_of_other_threads(threads: ThreadPoolExecutor) -> None:
    engine = slow(fake_engine(n_ctx=1024))
    calls = [threads.submit(engine.generate, [[i]], LONG) for i in range(3)]
    while not context_of(engine).steps:
        time.sleep(0.001)
    engine.close()
    for call in calls:
        try:
            assert call.result(timeout=10)[0].finish_reason is FinishReason.CANCELLED
        except EngineClosed:  # it was not in the engine yet
            continue


def test_an_exception_in_a_step_reaches_one_thread_and_the_others_continue(threads: ThreadPoolExecutor) -> None:
    n_failures = 0

    def fail_once(plan: object) -> None:
        nonlocal n_failures
        if len(context_of(engine).steps) == 10 and not n_failures:
            n_failures += 1
            raise RuntimeError("a bug")

    engine = slow(fake_engine(n_ctx=1024, on_plan=fail_once))
    params = greedy(30, ignore_eos=True)
    calls = [threads.submit(engine.generate, [[i]], params) for i in range(4)]
    failed = [call.exception(timeout=10) for call in calls]
    assert [repr(error) for error in failed if error] == ["RuntimeError('a bug')"]
    for i, call in enumerate(calls):
        if not failed[i]:
            assert call.result()[0].tokens == reference([i], params)[0]
    assert nothing_is_left(engine)


def test_ctrl_c_takes_effect_after_the_step_and_leaves_the_prefix_cache() -> None:
    engine = fake_engine(n_ctx=256, sharing="cells")
    prompt = list(range(40))
    decode = context_of(engine).decode

    def interrupted(batch: Any) -> None:
        if len(context_of(engine).steps) == 8:  # five of them have computed the prompt
            signal.raise_signal(signal.SIGINT)
        decode(batch)

    context_of(engine).decode = interrupted  # type: ignore[method-assign]
    read: list[int] = []

    def read_stream() -> None:
        for event in engine.stream(prompt, LONG):
            read.extend(event.tokens)

    with pytest.raises(KeyboardInterrupt):
        read_stream()
    assert read == reference(prompt, LONG)[0][:4]
    (result,) = engine.generate([prompt], SHORT)
    assert result.usage.cached_tokens >= len(prompt) - 1
    assert nothing_is_left(engine)


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
def test_ctrl_c_while_another_thread_steps(threads: ThreadPoolExecutor) -> None:
    engine = slow(fake_engine(n_ctx=4096))
    other = threads.submit(engine.generate, [[1]], LONG)
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[2]], greedy(1000, ignore_eos=True))
    assert other.result()[0].tokens == reference([1], LONG)[0]
    assert nothing_is_left(engine)


def test_a_fork_is_refused_at_once_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    monkeypatch.setattr(os, "getpid", lambda: 7)
    calls: list[Callable[[], object]] = [
        lambda: engine.generate([[1]], SHORT),
        lambda: list(engine.stream([1], SHORT)),
        lambda: list(engine.map([[1]], SHORT)),
        lambda: engine.add_request([1]),
        engine.step,
        engine.stats,
    ]
    for call in calls:
        with pytest.raises(EngineClosed, match=r"this is its fork, process 7.*load the engine after the fork"):
            call()
    engine.close()
    assert not context_of(engine).is_closed  # it belongs to the process that loaded it
