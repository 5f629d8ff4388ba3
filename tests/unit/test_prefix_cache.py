"""The prefix cache: what is computed only once, for which requests, how long it is kept, and that texts stay equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, FinishReason
from cppbatch.engine import core as core_module
from cppbatch.engine.kv.cached_prefix import CachedPrefix
from cppbatch.engine.kv.prefix_cache import PrefixCache, ReuseCosts
from cppbatch.engine.kv.save_cost import SaveCost
from cppbatch.errors import CacheFull, DecodeFailed, LlamaError
from tests.support.fakes import (
    FakeState,
    context_of,
    drain,
    endless,
    fake_engine,
    n_computed,
    reference,
    run_steps,
    tokens_of,
)

MEMORIES: dict[str, dict[str, Any]] = {
    "cells": {"sharing": "cells"},
    "copy": {"sharing": "copy", "unified": False},
    "whole": {"sharing": "whole", "ctx_checkpoints": 0},
    "whole in streams": {"sharing": "whole", "unified": False, "ctx_checkpoints": 0},
}
ANY_KIND = pytest.mark.parametrize("kind", MEMORIES)
ANY_PREFIX = pytest.mark.parametrize("kind", ["cells", "copy"])
"""Kinds in which any part of what another has computed can be taken."""
WHOLE = pytest.mark.parametrize("kind", ["whole", "whole in streams"])
COSTS = ReuseCosts(min_cached=8)  # so that prompts here can be short


def engine_of(kind: str, *, n_ctx: int = 1024, n_batch: int = 64, **settings: Any) -> BatchInferenceEngine:
    return fake_engine(n_ctx=n_ctx, n_batch=n_batch, reuse_costs=COSTS, **{**MEMORIES[kind], **settings})


def answer_to(prompt: list[int], n: int) -> list[int]:
    return reference(prompt, endless(n))[0]


def ask(engine: BatchInferenceEngine, prompt: list[int], n: int = 1, **options: Any) -> int:
    """Runs a request for `n` tokens while no other runs: how many tokens of its prompt were not computed."""
    before = n_computed(engine)
    name = engine.add_request(prompt, endless(n), **options)
    events = drain(engine)
    engine.core.kv.check()
    assert tokens_of(events, name) == answer_to(prompt, n)
    usage = events[-1].usage
    assert usage
    assert n_computed(engine) - before == len(prompt) - usage.cached_tokens + n - 1
    return usage.cached_tokens


def fill(engine: BatchInferenceEngine, n: int) -> None:
    """Runs a request that needs `n` cells and leaves none of them in the cache."""
    assert ask(engine, [50] * n, cache_prompt=False) == 0


# --- cached prefixes ------------------------------------------------------------------------------------------------


@ANY_KIND
def test_a_longer_prompt_computes_only_the_rest(kind: str) -> None:
    engine = engine_of(kind)
    assert [ask(engine, [1] * n) for n in (40, 41, 50, 150)] == [0, 40, 41, 50]


@ANY_PREFIX
def test_the_same_prompt_computes_only_its_last_token(kind: str) -> None:
    engine = engine_of(kind)
    assert [ask(engine, [1] * 40, 3) for _ in range(3)] == [0, 39, 39]
    assert context_of(engine).steps[-3:] == [{0: 1}] * 3


@ANY_PREFIX
@pytest.mark.parametrize("n", [1, 30, 39])
def test_a_shorter_prompt_computes_only_its_last_token(kind: str, n: int) -> None:
    engine = engine_of(kind)
    ask(engine, [1] * 40)
    assert ask(engine, [1] * n) == n - 1


@ANY_PREFIX
def test_a_prompt_that_diverges_from_another_computes_only_its_own_part(kind: str) -> None:
    engine = engine_of(kind)
    ask(engine, [1] * 40 + [2] * 15)
    assert ask(engine, [1] * 40 + [3] * 15, 5) == 40
    assert ask(engine, [1] * 30 + [4] * 15, 5) == 30


@ANY_KIND
def test_the_longest_prefix_is_taken(kind: str) -> None:
    engine = engine_of(kind)
    ask(engine, [1] * 10 + [2] * 10)
    ask(engine, [1] * 10 + [3] * 30)
    assert ask(engine, [1] * 10 + [3] * 30 + [4]) == 40


@ANY_KIND
def test_a_prompt_with_another_prefix_takes_nothing(kind: str) -> None:
    engine = engine_of(kind)
    ask(engine, [1, *[2] * 30])
    assert ask(engine, [3, *[2] * 30]) == 0


@ANY_KIND
def test_a_continued_conversation_computes_only_its_new_tokens(kind: str) -> None:
    engine = engine_of(kind)
    conversation = [1] * 40
    n_known = 0
    for turn in range(4):
        assert ask(engine, conversation, 6) == n_known
        n_known = len(conversation) + 5  # of the last token only the id is known
        conversation += [*answer_to(conversation, 6), *[2 + turn] * 9]


@pytest.mark.parametrize(("kind", "cost"), [("cells", COSTS.share), ("copy", COSTS.copy)])
def test_a_prefix_that_is_computed_sooner_than_taken_is_computed(kind: str, cost: int) -> None:
    for n_common, n_taken in ((cost, 0), (cost + 1, cost + 1)):
        engine = engine_of(kind)
        ask(engine, [1] * 99)
        assert ask(engine, [1] * n_common + [2] * 9) == n_taken


def test_where_prefixes_are_copied_one_that_can_be_continued_in_place_is_taken_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of("copy")
    engine.add_request([1] * 30 + [2], endless(100))  # runs all the time and could be copied from
    engine.step()
    for i in range(3, 9):
        name = engine.add_request([1] * 30 + [i] * 5, endless(2))
        events = engine.step()
        while not any(event.finish_reason for event in events if event.request_id == name):
            events = engine.step()
        assert engine.stats().prefix_hit_tokens == 30 * (i - 2)
        monkeypatch.setattr(context_of(engine), "save_sequence", forbidden)  # only the first one had to copy
    drain(engine)


def forbidden(seq_id: int) -> Any:
    raise AssertionError("a prefix is copied that could be continued in place")


@ANY_KIND
@pytest.mark.parametrize(("n", "kept"), [(7, 0), (8, 1)])
def test_very_short_prefixes_are_not_kept(kind: str, n: int, kept: int) -> None:
    engine = engine_of(kind)
    ask(engine, [1] * n)
    assert engine.stats().prefixes_in_cells == kept


def test_cached_prefixes_leave_the_lowest_seq_ids_to_those_that_run() -> None:
    engine = engine_of("cells")
    for i in range(4):
        ask(engine, [i] * 20)
    assert context_of(engine).steps == [{0: 20}] * 4
    assert engine.stats().prefixes_in_cells == 4


# --- prefixes of running sequences ----------------------------------------------------------------------------------


@ANY_PREFIX
def test_a_running_request_shares_its_prompt_and_keeps_it(kind: str) -> None:
    engine = engine_of(kind)
    first = engine.add_request([1] * 40, endless(30))
    events = run_steps(engine, 6)
    second = engine.add_request([1] * 35 + [2] * 3, endless(9))
    events += drain(engine)
    assert {event.request_id: event.usage.cached_tokens for event in events if event.usage} == {first: 0, second: 35}
    assert tokens_of(events, first) == answer_to([1] * 40, 30)
    assert tokens_of(events, second) == answer_to([1] * 35 + [2] * 3, 9)
    engine.core.kv.check()


BEGIN_ALIKE = pytest.mark.parametrize(
    ("prompts", "n_once"),
    [
        ([[1] * 50] * 2, 51),
        ([[1] * 50] * 4, 53),
        ([[1] * 40 + [2] * 20, [1] * 40 + [3] * 20], 80),
        ([[1] * 40, [1] * 80, [1] * 120], 120),
        ([[1] * 120, [1] * 80, [1] * 40], 122),
    ],
    ids=["equal", "four equal", "parting", "growing", "shrinking"],
)


@ANY_KIND
@BEGIN_ALIKE
@pytest.mark.parametrize("n_batch", [8, 64, 512])
@pytest.mark.parametrize("n", [1, 6])
def test_new_prompts_that_arrive_together_compute_what_they_have_in_common_once(
    kind: str, prompts: list[list[int]], n_once: int, n_batch: int, n: int
) -> None:
    engine = engine_of(kind, n_batch=n_batch)
    results = engine.generate(prompts, endless(n))
    assert [result.tokens for result in results] == [answer_to(prompt, n) for prompt in prompts]
    assert n_computed(engine) == n_once + len(prompts) * (n - 1)
    assert sum(result.usage.cached_tokens for result in results) == sum(map(len, prompts)) - n_once


@ANY_KIND
@pytest.mark.parametrize(("n", "waits"), [(COSTS.worth_waiting, False), (COSTS.worth_waiting + 1, True)])
def test_only_a_long_prefix_is_worth_waiting_for(kind: str, n: int, waits: bool) -> None:
    engine = engine_of(kind, n_batch=128)
    for _ in range(2):
        engine.add_request([1] * n, endless(2))
    engine.step()
    assert engine.stats().waiting == waits
    drain(engine)
    assert n_computed(engine) == (n + 1 if waits else 2 * n) + 2


@ANY_KIND
def test_a_request_that_waits_for_a_prefix_lets_others_pass(kind: str) -> None:
    engine = engine_of(kind, n_batch=8)
    engine.add_request([1] * 80, endless(1))
    waiting = engine.add_request([1] * 80, endless(1))
    engine.add_request([2] * 3, endless(2))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)
    assert waiting in [event.request_id for event in drain(engine)[-2:]]


@ANY_KIND
def test_a_request_that_waits_for_a_prefix_continues_with_the_part_that_a_cancelled_request_computed(kind: str) -> None:
    engine = engine_of(kind, n_batch=8)
    first = engine.add_request([1] * 80, endless(1))
    second = engine.add_request([1] * 80, endless(5))
    for _ in range(5):
        engine.step()
    engine.cancel(first)
    events = drain(engine)
    assert n_computed(engine) == 80 + 4
    assert tokens_of(events, second) == answer_to([1] * 80, 5)


@ANY_KIND
def test_a_request_that_waits_for_a_prefix_computes_it_if_the_other_fails(kind: str) -> None:
    engine = engine_of(kind, n_batch=8)
    context_of(engine).fail_at[3] = DecodeFailed(-3, "made to fail")
    engine.add_request([1] * 80, endless(1))
    second = engine.add_request([1] * 80, endless(5))
    events = drain(engine)
    assert n_computed(engine) == 3 * 8 + 80 + 4
    assert tokens_of(events, second) == answer_to([1] * 80, 5)


def test_completions_of_one_prompt_hold_its_cells_once() -> None:
    engine = engine_of("cells", n_parallel=8)
    for _ in range(8):
        engine.add_request([1] * 40, endless(10))
    peak = 0
    while engine.has_work:
        engine.step()
        peak = max(peak, context_of(engine).n_used)
    assert 40 + 7 * 9 <= peak <= 40 + 8 * 10
    assert n_computed(engine) == 40 + 7 + 8 * 9


# --- which requests share -------------------------------------------------------------------------------------------


@ANY_KIND
def test_a_request_that_is_not_to_be_cached_neither_takes_nor_leaves(kind: str) -> None:
    engine = engine_of(kind)
    assert ask(engine, [1] * 40, cache_prompt=False) == 0
    assert engine.stats().kv_cells_cached == 0
    assert ask(engine, [1] * 41) == 0
    assert ask(engine, [1] * 42, cache_prompt=False) == 0
    assert ask(engine, [1] * 43) == 41


@ANY_KIND
def test_a_running_request_that_is_not_to_be_cached_shares_nothing(kind: str) -> None:
    engine = engine_of(kind)
    for cache_prompt in (False, True, False):
        engine.add_request([1] * 40, endless(2), cache_prompt=cache_prompt)
    drain(engine)
    assert n_computed(engine) == 3 * 41
    assert engine.stats().prefix_queries == 1


@ANY_KIND
def test_only_requests_of_the_same_salt_share(kind: str) -> None:
    engine = engine_of(kind)
    salts = ("a", "b", "", "a", "b", "")
    lengths = (40, 40, 40, 41, 42, 43)
    cached = [ask(engine, [1] * n, cache_salt=salt) for n, salt in zip(lengths, salts, strict=True)]
    assert cached == [0, 0, 0, 40, 40, 40]


@ANY_KIND
def test_requests_of_different_salts_that_arrive_together_do_not_share(kind: str) -> None:
    engine = engine_of(kind)
    for salt in ("a", "b", "a", "b"):
        engine.add_request([1] * 40, endless(1), cache_salt=salt)
    drain(engine)
    assert n_computed(engine) == 2 * 41


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
def test_turned_off_nothing_is_shared_or_kept(unified: bool) -> None:
    engine = fake_engine(n_ctx=1024, n_batch=64, unified=unified, sharing="none")
    engine.generate([[1] * 40] * 3, endless(2))
    assert ask(engine, [1] * 41) == 0
    assert n_computed(engine) == 3 * 41 + 41
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.kv_cells_cached) == (0, 0, 0)
    assert stats.seq_ids_free == stats.seq_ids


# --- what those that end leave --------------------------------------------------------------------------------------


@ANY_KIND
@pytest.mark.parametrize(("steps", "n_cached"), [(0, 0), (4, 32), (6, 41)], ids=["waiting", "reading", "writing"])
def test_tokens_computed_for_a_cancelled_request_are_reused(kind: str, steps: int, n_cached: int) -> None:
    engine = engine_of(kind, n_batch=8)
    cancelled = engine.add_request([1] * 40, endless(9))
    for _ in range(steps):
        engine.step()
    engine.cancel(cancelled)
    assert engine.core.kv.n_used == 0
    drain(engine)
    assert ask(engine, [1] * 40 + answer_to([1] * 40, 9)) == n_cached


@ANY_KIND
def test_tokens_computed_for_a_timed_out_request_are_reused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(kind, n_batch=8)
    engine.add_request([1] * 40, endless(9), timeout=1000)
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as later:
        later.setattr(core_module, "perf_counter", lambda: 1e12)
        assert engine.step()[-1].finish_reason is FinishReason.TIMEOUT
    assert ask(engine, [1] * 40) == 32


@ANY_KIND
@pytest.mark.parametrize("error", [DecodeFailed(-3, "no reason"), CacheFull("no free KV cells")])
def test_tokens_computed_for_a_failed_request_are_not_reused(kind: str, error: LlamaError) -> None:
    engine = engine_of(kind, n_batch=8)
    context_of(engine).fail_at[5] = error
    engine.add_request([1] * 40, endless(9))
    drain(engine)
    assert (engine.stats().finished, engine.stats().kv_cells_cached) == ({"error": 1}, 0)
    assert ask(engine, [1] * 40) == 0


@ANY_KIND
def test_a_failed_request_leaves_others_what_they_have_taken_from_it(kind: str) -> None:
    engine = engine_of(kind, n_batch=8)
    context = context_of(engine)
    engine.add_request([1] * 50 + [2] * 50, endless(9))
    other = engine.add_request([1] * 50 + [3] * 9, endless(9))
    while engine.stats().running < 2:
        engine.step()
    was_for_first = 0 in context.steps[-1]  # the two take turns
    context.fail_at[len(context.steps) + 1 + was_for_first] = DecodeFailed(-3, "made to fail")
    events = drain(engine)
    engine.core.kv.check()
    assert engine.stats().finished == {"error": 1, "length": 1}
    assert events[-1].usage
    assert events[-1].usage.cached_tokens == 50
    assert tokens_of(events, other) == answer_to([1] * 50 + [3] * 9, 9)


@ANY_PREFIX
def test_a_prefix_that_another_covers_is_dropped(kind: str) -> None:
    engine = engine_of(kind)
    for n, n_cached in ((30, 30), (100, 100), (45, 100)):
        ask(engine, [1] * n)
        assert (engine.stats().prefixes_in_cells, engine.stats().kv_cells_cached) == (1, n_cached)


@WHOLE
def test_where_only_all_can_be_taken_a_shorter_prefix_is_kept_beside_a_longer(kind: str) -> None:
    engine = engine_of(kind)
    assert [ask(engine, [1] * n) for n in (60, 30, 30)] == [0, 0, 0]
    assert (engine.stats().prefixes_in_cells, engine.stats().kv_cells_cached) == (2, 90)
    assert [ask(engine, [1] * n) for n in (50, 70)] == [30, 60]


@WHOLE
def test_where_only_all_can_be_taken_a_prompt_that_parts_earlier_computes_all(kind: str) -> None:
    engine = engine_of(kind)
    ask(engine, [1] * 40, 5)
    assert ask(engine, [1] * 40) == 0
    assert ask(engine, [1] * 40 + [2] * 9) == 40  # the second one's prompt
    assert ask(engine, [1] * 39 + [3] * 9) == 0


# --- separate streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "taken_over"), [(50, True), (49, False)])
def test_a_stream_is_taken_over_when_half_of_it_is_used_and_else_copied(n: int, taken_over: bool) -> None:
    engine = engine_of("copy", n_batch=128)
    ask(engine, [1] * 100)
    engine.add_request([1] * n + [2] * 5, endless(9))
    engine.step()
    assert engine.stats().prefixes_in_cells == (0 if taken_over else 1)
    drain(engine)
    assert context_of(engine).steps[1] == {0 if taken_over else 1: 5}
    assert ask(engine, [1] * 101) == 100


@pytest.mark.parametrize(("n", "kept"), [(70, True), (95, False)])
def test_a_stream_that_is_taken_over_leaves_what_it_loses_in_host_memory(n: int, kept: bool) -> None:
    engine = engine_of("copy")
    ask(engine, [1] * 100)
    assert ask(engine, [1] * n + [2] * 5) == n
    assert engine.stats().prefixes_in_host == kept
    assert ask(engine, [1] * 101) == (100 if kept else n)


@WHOLE
def test_where_only_all_can_be_taken_a_copy_leaves_it_for_others_and_the_last_seq_id_is_taken_over(kind: str) -> None:
    for n_parallel, stay in ((4, 1), (1, 0)):
        engine = engine_of(kind, n_parallel=n_parallel)
        ask(engine, [1] * 40)
        engine.add_request([1] * 45, endless(9))
        for _ in range(2):
            engine.step()
        assert 5 in context_of(engine).steps[1].values()
        assert engine.stats().prefixes_in_cells == stay
        drain(engine)
        engine.core.kv.check()


@ANY_PREFIX
def test_the_only_stream_is_taken_over_however_little_of_it_is_used(kind: str) -> None:
    engine = engine_of(kind, n_parallel=1, n_more_ids=0)
    ask(engine, [1] * 99)
    assert ask(engine, [1] * 30 + [2] * 20) == 30
    assert (engine.stats().prefixes_in_cells, engine.stats().prefixes_in_host) == (1, 1)


@pytest.mark.parametrize("kind", ["copy", "whole", "whole in streams"])
def test_no_cached_stream_stays_between_those_that_run(kind: str) -> None:
    engine = engine_of(kind)
    names = [engine.add_request([i] * 20, endless(50)) for i in range(3)]
    engine.step()
    engine.cancel(names[1])
    engine.add_request([9] * 20, endless(9))
    engine.step()  # what two streams take alone is to be known first
    engine.step()
    assert set(context_of(engine).steps[-1]) == {0, 1, 2}
    assert (engine.stats().prefixes_in_cells, engine.stats().prefixes_in_host) == (0, 1)
    drain(engine)
    assert ask(engine, [1] * 21) == 20


# --- eviction, and host memory --------------------------------------------------------------------------------------


def test_of_prefixes_with_a_common_start_only_the_last_one_is_saved_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chances: list[float] = []

    def is_worth(_cost: SaveCost, _n: int, chance: float) -> bool:
        chances.append(chance)
        return chance > 0.05

    monkeypatch.setattr(SaveCost, "is_worth", is_worth)
    engine = engine_of("copy", n_parallel=3, n_more_ids=0, n_batch=512)
    common, others = [1] * 90, [[i] * 50 for i in (6, 7, 8)]
    for prompts in ([[*common, *[i] * 9] for i in (2, 3, 4)], others):
        for prompt in prompts:
            engine.add_request(prompt, endless(2))
        drain(engine)
    assert engine.stats().prefixes_in_host == 1
    assert chances == pytest.approx([0.1 * 10 / 100, 0.1 * 10 / 100, 0.1])  # 100 tokens are computed, 10 their own
    assert ask(engine, [*common, 5, 5]) == 90


def test_the_least_recently_used_prefix_gives_up_its_cells_first() -> None:
    engine = engine_of("cells", n_ctx=128, n_batch=128, prefix_cache_ram=0)
    for i in (1, 2, 3, 1):
        ask(engine, [i] * 10)
    fill(engine, 100)
    assert engine.stats().prefixes_in_cells == 2
    assert [ask(engine, [i] * 10) for i in (1, 3, 2)] == [9, 9, 0]


@pytest.mark.parametrize("kind", ["copy", "whole", "whole in streams"])
def test_when_the_seq_ids_are_used_up_the_least_recently_used_prefix_gives_its_own_up(kind: str) -> None:
    engine = engine_of(kind, n_parallel=3, prefix_cache_ram=0)
    for i, n in ((1, 40), (2, 40), (3, 40), (1, 41), (4, 40)):
        ask(engine, [i] * n)
    assert [ask(engine, [i] * 50) for i in (1, 3, 2)] == [41, 40, 0]


def test_when_no_seq_id_is_left_to_keep_prefixes_under_the_least_recently_used_goes() -> None:
    engine = engine_of("cells", n_more_ids=2, prefix_cache_ram=0)
    for i in (1, 2, 3):
        ask(engine, [i] * 40)
    assert engine.stats().prefixes_in_cells == 2
    assert [ask(engine, [i] * 40) for i in (3, 1)] == [39, 0]


@pytest.mark.parametrize("kind", ["cells", "whole"])
@pytest.mark.parametrize("n", [32, 33])
def test_of_cells_that_all_share_at_most_a_quarter_stay_cached(kind: str, n: int) -> None:
    engine = engine_of(kind, n_ctx=128)
    ask(engine, [1] * n)
    stats = engine.stats()
    assert (stats.prefixes_in_cells, stats.prefixes_in_host) == ((1, 0) if n == 32 else (0, 1))
    for i in range(2, 9):
        ask(engine, [i] * (5 * i))
        assert engine.stats().kv_cells_cached == context_of(engine).n_used <= 32


@pytest.mark.parametrize("kind", ["copy", "whole in streams"])
def test_separate_streams_may_all_stay_cached(kind: str) -> None:
    engine = engine_of(kind, n_ctx=128)
    for i in range(4):
        ask(engine, [i] * 30)
    assert (engine.stats().prefixes_in_cells, engine.stats().kv_cells_cached) == (4, 120)


@ANY_KIND
def test_an_evicted_prefix_comes_back_from_host_memory(kind: str) -> None:
    engine = engine_of(kind, n_parallel=1, n_more_ids=0)
    ask(engine, [1] * 40)
    ask(engine, [2] * 40)
    stats = engine.stats()
    assert (stats.prefixes_in_cells, stats.prefixes_in_host, stats.prefix_cache_bytes) == (1, 1, 1 << 20)
    assert ask(engine, [1] * 45) == 40
    assert ask(engine, [2] * 45) == 40


@pytest.mark.parametrize("kind", ["cells", "whole"])
def test_cells_that_run_out_are_taken_from_cached_prefixes_which_come_back_later(kind: str) -> None:
    engine = engine_of(kind, n_ctx=128, n_batch=128)
    ask(engine, [1] * 30)
    fill(engine, 120)
    assert (engine.stats().prefixes_in_cells, engine.stats().prefixes_in_host) == (0, 1)
    assert ask(engine, [1] * 35) == 30


@ANY_KIND
def test_without_host_memory_an_evicted_prefix_is_forgotten(kind: str) -> None:
    engine = engine_of(kind, n_parallel=1, n_more_ids=0, prefix_cache_ram=0)
    ask(engine, [1] * 40)
    ask(engine, [2] * 40)
    assert (engine.stats().prefixes_in_host, engine.stats().prefix_cache_bytes) == (0, 0)
    assert ask(engine, [1] * 45) == 0


@ANY_KIND
def test_host_memory_that_is_full_forgets_the_least_recently_used(kind: str) -> None:
    engine = engine_of(kind, n_parallel=1, n_more_ids=0, prefix_cache_ram=2)
    for i in (1, 2, 3, 4):
        ask(engine, [i] * 40)
        assert engine.stats().prefix_cache_bytes <= 2 << 20
    assert engine.stats().prefixes_in_host == 2
    assert [ask(engine, [i] * 45) for i in (2, 1)] == [40, 0]


def test_a_prefix_larger_than_the_host_memory_for_all_is_forgotten() -> None:
    cache = PrefixCache(engine_of("cells").core.kv.cache.sharing, host_bytes=100)
    for n_bytes in (60, 101, 40):
        cached = CachedPrefix(np.full(20, n_bytes % 64, np.int32), ("", ()), 0, None)
        cache.add(cached)
        cache.leave_cells(cached, for_host=True)
        cache.keep_in_host(cached, FakeState(b"", n_bytes))
    assert (len(cache.in_host), cache.used_host_bytes) == (2, 100)


@pytest.mark.parametrize(("n_more", "from_host"), [(-1, False), (1, True)])
def test_host_memory_is_used_only_for_a_prefix_much_longer_than_that_in_cells(n_more: int, from_host: bool) -> None:
    engine = engine_of("cells", n_ctx=128, n_batch=128)
    n = 10 + COSTS.copy - COSTS.share + n_more
    ask(engine, [1] * n)
    fill(engine, 120)
    assert ask(engine, [1] * 10 + [2]) == 0
    assert ask(engine, [1] * 30) == (n if from_host else 10)


def test_a_prefix_that_cannot_be_brought_back_is_computed() -> None:
    engine = engine_of("cells", n_ctx=128, n_batch=128)
    ask(engine, [1] * 30)
    fill(engine, 120)
    context_of(engine).fail_restore = True
    assert ask(engine, [1] * 35, 3) == 0


def test_cells_that_a_running_request_shares_are_not_taken_from_it() -> None:
    engine = engine_of("cells", n_ctx=128, n_batch=128, target_itl_ms=60_000)
    ask(engine, [1] * 32)
    running = engine.add_request([1] * 20 + [2], endless(5))
    events = engine.step()
    assert (engine.core.kv.n_used, engine.core.kv.n_cached) == (21, 12)
    big = engine.add_request([3] * 97, endless(1), cache_prompt=False)
    events += engine.step()
    assert (engine.stats().prefixes_in_cells, engine.stats().prefixes_in_host) == (0, 1)
    events += drain(engine)
    assert (engine.stats().swaps, engine.stats().recomputes) == (0, 0)
    assert tokens_of(events, running) == answer_to([1] * 20 + [2], 5)
    assert tokens_of(events, big) == answer_to([3] * 97, 1)


# --- the books ------------------------------------------------------------------------------------------------------


@ANY_KIND
def test_queries_hits_and_their_tokens_are_counted(kind: str) -> None:
    engine = engine_of(kind)
    for prompt in ([1] * 40, [1] * 45, [2] * 40, [1] * 50):
        ask(engine, prompt)
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prefix_hit_tokens) == (4, 2, 85)
    n, cells = (4, 175) if kind.startswith("whole") else (2, 90)  # what is part of another is kept only there
    assert (stats.prefixes_in_cells, stats.kv_cells_cached, stats.kv_cells_used) == (n, cells, 0)


def test_cells_that_run_and_are_cached_too_count_as_used() -> None:
    engine = engine_of("cells")
    ask(engine, [1] * 40)
    engine.add_request([1] * 30 + [2] * 5, endless(9))
    engine.step()
    assert (engine.stats().kv_cells_used, engine.stats().kv_cells_cached, context_of(engine).n_used) == (35, 10, 45)
    drain(engine)


@ANY_KIND
def test_after_clearing_the_cache_every_cell_and_seq_id_is_free(kind: str) -> None:
    engine = engine_of(kind)
    for i in range(12):
        ask(engine, [i] * 20, 3)
    before = engine.stats()
    assert min(before.prefixes_in_cells, before.prefixes_in_host, before.kv_cells_cached) > 0
    engine.clear_prefix_cache()
    engine.core.kv.check()
    stats = engine.stats()
    assert (stats.prefixes_in_cells, stats.prefixes_in_host, stats.prefix_cache_bytes) == (0, 0, 0)
    assert (stats.kv_cells_cached, stats.seq_ids_free, context_of(engine).n_used) == (0, stats.seq_ids, 0)
    assert ask(engine, [1] * 25) == 0


@ANY_KIND
def test_clearing_the_cache_takes_nothing_from_those_that_run(kind: str) -> None:
    engine = engine_of(kind)
    ask(engine, [1] * 40)
    ask(engine, [2] * 40)
    running = engine.add_request([1] * 45, endless(9))
    events = run_steps(engine, 2)
    engine.clear_prefix_cache()
    engine.core.kv.check()
    assert engine.core.kv.n_used >= 45
    assert engine.core.kv.n_cached == 0
    events += drain(engine)
    assert tokens_of(events, running) == answer_to([1] * 45, 9)


# --- what once went wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap_space", [0, 1024])
def test_a_request_preempted_while_its_prompt_is_read_is_counted_once(swap_space: int) -> None:
    engine = engine_of("cells", n_ctx=128, n_batch=8, n_parallel=2, swap_space=swap_space)
    ask(engine, [1] * 30)
    engine.add_request([1] * 30 + [3] * 40, endless(3), priority=1)
    for _ in range(2):
        engine.step()
    engine.add_request([2] * 90, endless(3))
    drain(engine)
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prefix_hit_tokens) == (3, 1, 30)
    assert stats.swaps + stats.recomputes == 1


def test_a_repeated_request_evicts_no_other_from_a_full_cache() -> None:
    engine = engine_of("cells", n_more_ids=2, prefix_cache_ram=0)
    for prompt in ([1] * 40, [2] * 40, [2] * 40, [2] * 50):
        ask(engine, prompt)
    assert engine.stats().prefixes_in_cells == 2
    assert ask(engine, [1] * 45) == 40


def test_a_prefix_restored_from_host_memory_stays_in_cells() -> None:
    engine = engine_of("cells", n_ctx=256, n_batch=256)
    ask(engine, [1] * 40)
    fill(engine, 250)
    assert engine.stats().prefixes_in_host == 1
    assert ask(engine, [1] * 40) == 39
    assert (engine.stats().prefixes_in_cells, engine.stats().prefixes_in_host) == (1, 0)


def test_one_long_prefix_does_not_evict_all_others() -> None:
    engine = engine_of("cells", prefix_cache_ram=0)
    for i in (1, 2, 3, 4):
        ask(engine, [i] * 40)
    ask(engine, [5] * 300)
    assert engine.stats().prefixes_in_cells == 4


def test_a_prefix_evicted_in_the_step_that_needs_it_is_still_found() -> None:
    engine = engine_of("copy", n_parallel=3, n_ctx=384)
    prompts = [[i] * 60 for i in (1, 2, 3)]
    for prompt in prompts:
        ask(engine, prompt)
    names = [engine.add_request(prompt, endless(3)) for prompt in ([7] * 5, [8] * 5, [1] * 70)]
    usages = {event.request_id: event.usage for event in drain(engine) if event.usage}
    assert usages[names[2]].cached_tokens == 60
