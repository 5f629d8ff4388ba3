"""`engine.map`: any number of prompts, taken as they are needed, and each result as soon as it is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason, InvalidRequest, Mapped, SamplingParams
from cppbatch.errors import EngineClosed
from tests.support.fakes import context_of, drain, fake_engine, greedy, reference

SHORT, LONG = greedy(2, ignore_eos=True), greedy(30, ignore_eos=True)


class Source:
    """An endless iterable that counts the items taken from it."""

    def __init__(self) -> None:
        self.n_taken = 0

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        self.n_taken += 1
        return prompt(self.n_taken - 1)


def prompt(i: int) -> list[int]:
    return [i % 50, i // 50 % 50, 7]


def check(result: Mapped, params: SamplingParams) -> None:
    tokens, text, reason = reference(prompt(result.index), params)
    assert result.prompt == prompt(result.index)
    assert (result.completion.tokens, result.completion.text, result.completion.finish_reason) == (tokens, text, reason)


def nothing_is_left(engine: BatchInferenceEngine) -> bool:
    engine.clear_prefix_cache()
    return not engine.has_work and not engine.core.outputs._kept and context_of(engine).n_used == 0


@pytest.mark.parametrize("ordered", [False, True])
def test_each_prompt_gets_the_text_it_gets_alone_once(ordered: bool) -> None:
    engine = fake_engine(n_ctx=256)
    params = greedy(12)
    results = list(engine.map((prompt(i) for i in range(100)), params, ordered=ordered))
    for result in results:
        check(result, params)
    indices = [result.index for result in results]
    assert sorted(indices) == list(range(100))
    assert (indices == sorted(indices)) == ordered
    assert nothing_is_left(engine)


def test_results_are_yielded_in_order_of_completion() -> None:
    engine = fake_engine(n_ctx=256)
    pairs = [(prompt(0), LONG), (prompt(1), SHORT), (prompt(2), SHORT)]
    assert [result.index for result in engine.map(pairs)] == [1, 2, 0]


def test_pairs_have_their_own_params_and_the_others_the_common_ones() -> None:
    engine = fake_engine(n_ctx=256)
    results = list(engine.map([prompt(0), (prompt(1), SHORT)], LONG, ordered=True))
    check(results[0], LONG)
    check(results[1], SHORT)


def test_an_empty_iterable_gives_no_results() -> None:
    assert list(fake_engine().map([])) == []


def test_it_takes_what_runs_and_as_many_to_follow_and_no_more_from_an_endless_iterable() -> None:
    engine, source = fake_engine(n_ctx=256, n_parallel=4), Source()
    results = engine.map(source, SHORT)
    assert source.n_taken == 0, "nothing is done before a result is requested"
    for i in range(1, 200):
        check(next(results), SHORT)
        assert source.n_taken <= i + 2 * 4
        assert len(engine.core.sequences) <= 2 * 4
    results.close()
    assert nothing_is_left(engine)


def test_all_places_are_kept_busy() -> None:
    engine = fake_engine(n_ctx=256, n_parallel=4, n_batch=16)
    list(engine.map((prompt(i) for i in range(200)), SHORT))
    stats = engine.stats()
    assert stats.steps <= 110, "of two steps for each prompt, in four places, 100"


def test_the_engine_steps_only_while_a_result_is_requested() -> None:
    engine = fake_engine(n_ctx=256)
    results = engine.map(Source(), SHORT)
    next(results)
    n_steps = engine.stats().steps
    next(results)  # is there already: prompts of one step end together
    assert engine.stats().steps == n_steps


def test_in_order_no_more_are_held_back_than_eight_times_as_many_as_run() -> None:
    engine, n_taken = fake_engine(n_ctx=512, n_parallel=2, n_batch=64), 0

    def pairs() -> Iterator[tuple[list[int], SamplingParams]]:
        nonlocal n_taken
        for n_taken in itertools.count(1):
            yield prompt(n_taken - 1), greedy(60 if n_taken == 1 else 1, ignore_eos=True)

    results = engine.map(pairs(), ordered=True)
    assert next(results).index == 0
    assert n_taken == 8 * 2
    assert [next(results).index for _ in range(30)] == list(range(1, 31))
    results.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_prompt_that_cannot_run_is_a_result_that_names_the_field_and_the_others_continue(ordered: bool) -> None:
    engine = fake_engine(n_ctx=256)
    items: list[Any] = [prompt(0), [], prompt(2), ([99999], SHORT), 5, (prompt(5), greedy(1000)), prompt(6)]
    results = {result.index: result for result in engine.map(items, SHORT, ordered=ordered)}
    assert sorted(results) == list(range(7))
    for i in (0, 2, 6):
        check(results[i], SHORT)
    for i, field in ((1, "prompt"), (3, "prompt"), (4, "prompt"), (5, "max_tokens")):
        completion = results[i].completion
        assert (completion.finish_reason, completion.tokens) == (FinishReason.ERROR, [])
        assert completion.error is not None
        assert completion.error.startswith(field)
    assert results[3].prompt == [99999]
    assert nothing_is_left(engine)


def test_an_endless_iterable_of_such_prompts_gives_an_endless_number_of_errors() -> None:
    results = fake_engine().map(itertools.repeat([]))
    assert [next(results).index for _ in range(500)] == list(range(500))


def test_closing_it_cancels_the_remaining_requests() -> None:
    engine = fake_engine(n_ctx=256)
    results = engine.map(Source(), LONG)
    next(results)
    results.close()
    assert nothing_is_left(engine)
    assert engine.stats().finished["cancelled"] > 0
    with pytest.raises(StopIteration):
        next(results)


def test_an_exception_of_the_iterable_is_raised_and_cancels_running_requests() -> None:
    def broken() -> Iterator[list[int]]:
        yield from map(prompt, range(10))
        raise OSError("the disk is gone")

    engine = fake_engine(n_ctx=256)
    other = engine.add_request([9, 9], SHORT)
    with pytest.raises(OSError, match="the disk is gone"):
        list(engine.map(broken(), LONG))
    assert {event.request_id for event in drain(engine)} == {other}
    assert nothing_is_left(engine)


def test_arguments_that_are_invalid_for_every_prompt_are_refused_at_once() -> None:
    engine = fake_engine()
    with pytest.raises(InvalidRequest, match=r"prompts.*a single string"):
        engine.map("once")
    with pytest.raises(InvalidRequest, match="priority"):
        engine.map([], priority=1000)
    with pytest.raises(InvalidRequest, match="params"):
        engine.map([], [SHORT])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="embed"):
        fake_engine(pooling="mean").map([])


def test_an_engine_that_is_closed_meanwhile_returns_its_results_and_accepts_no_more() -> None:
    engine, source = fake_engine(n_ctx=256, n_parallel=2), Source()
    results = engine.map(source, LONG)
    next(results)
    engine.close()
    reasons = [next(results).completion.finish_reason for _ in range(source.n_taken - 1)]
    assert reasons == [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.CANCELLED]
    with pytest.raises(EngineClosed):
        next(results)


def test_requests_beside_it_advance_and_get_their_own_events() -> None:
    engine = fake_engine(n_ctx=512, n_parallel=4)
    beside = engine.add_request([1, 2, 3], LONG)
    results = engine.map((prompt(i) for i in range(20)), SHORT)
    given = [next(results) for _ in range(6)]
    stream = engine.stream([4, 5, 6], SHORT)
    streamed = [token for event in stream for token in event.tokens]
    events = engine.step()
    given += results
    events += drain(engine)
    for result in given:
        check(result, SHORT)
    assert len(given) == 20
    assert streamed == reference([4, 5, 6], SHORT)[0]
    assert {event.request_id for event in events} == {beside}
    assert [token for event in events for token in event.tokens] == reference([1, 2, 3], LONG)[0]


def test_results_wait_for_their_iterator_whichever_one_steps_and_are_not_work() -> None:
    engine = fake_engine(n_ctx=256, n_parallel=2)
    results = engine.map((prompt(i) for i in range(9)), SHORT)
    given = [next(results)]
    assert drain(engine) == [], "all that it has taken ends, without events for other callers"
    given += results
    assert len(given) == 9
    for result in given:
        check(result, SHORT)
    assert nothing_is_left(engine)


def test_one_map_may_feed_another() -> None:
    engine = fake_engine(n_ctx=512, n_parallel=4)
    first = engine.map((prompt(i) for i in range(20)), greedy(5, ignore_eos=True), ordered=True)
    second = engine.map((result.completion.tokens for result in first), SHORT, ordered=True)
    texts = [reference(prompt(i), greedy(5, ignore_eos=True))[0] for i in range(20)]
    assert [result.completion.tokens for result in second] == [reference(text, SHORT)[0] for text in texts]
    assert nothing_is_left(engine)
