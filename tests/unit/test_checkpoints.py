"""Checkpoints: where a memory cannot be truncated anywhere, requests still take the prefixes of earlier ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.engine.kv.checkpoints import CheckpointPlaces
from cppbatch.engine.kv.prefix_cache import ReuseCosts
from tests.support.fakes import context_of, drain, fake_engine, greedy, reference, tokens_of

MARKER = 8  # a marker of the fake vocabulary
MEMORIES: dict[str, dict[str, Any]] = {
    "cells and states": {"sharing": "checkpoints"},
    "streams and states": {"sharing": "checkpoints", "unified": False},
    "states": {"sharing": "whole"},
}
ANY_MEMORY = pytest.mark.parametrize("kind", MEMORIES)
WITH_CELLS = pytest.mark.parametrize("kind", ["cells and states", "streams and states"])


def engine_of(kind: str, **settings: Any) -> BatchInferenceEngine:
    return fake_engine(
        reuse_costs=ReuseCosts(min_cached=8), **{"n_ctx": 2048, "n_batch": 64, **MEMORIES[kind], **settings}
    )


def ask(engine: BatchInferenceEngine, *prompts: list[int], n: int = 4, **options: Any) -> list[int]:
    """Runs these requests at the same time: how many tokens each took. Their texts are those without a cache."""
    names = [engine.add_request(prompt, greedy(n, ignore_eos=True), **options) for prompt in prompts]
    events = drain(engine)
    engine.core.kv.check()
    for name, prompt in zip(names, prompts, strict=True):
        assert tokens_of(events, name) == reference(prompt, greedy(n, ignore_eos=True))[0]
    usages = {event.request_id: event.usage for event in events if event.usage}
    return [usage.cached_tokens for name in names if (usage := usages[name])]


def message(author: int, n: int) -> list[int]:
    """A message of `n` tokens, with markers before and after it, as chat templates write them."""
    return [MARKER, author, *[10 + (author + i) % 40 for i in range(n)], MARKER, 9]


HEADER = [MARKER, 20]  # of the answer
SYSTEM = message(1, 100)


def places(prompt: list[int], start: int = 0, min_step: int = 16, most: int = 32) -> list[int]:
    markers = np.isin(np.arange(64), [MARKER])
    return CheckpointPlaces(markers, most=most).of_prompt(np.array(prompt, np.int32), start, min_step)


def test_a_conversation_gets_checkpoints_around_its_last_message_and_after_its_system_prompt() -> None:
    prompt = SYSTEM + message(2, 50) + message(3, 50) + message(2, 60) + HEADER
    before_last = len(prompt) - len(HEADER) - len(message(2, 60))
    found = places(prompt)
    assert found[-1] == len(prompt) - len(HEADER)
    assert before_last in found
    assert found[0] == len(SYSTEM)


def test_a_text_without_messages_gets_checkpoints_a_short_distance_before_its_end() -> None:
    assert places([10] * 400) == [400 - 256, 400 - 32, 400 - 4]


def test_old_messages_get_few_checkpoints_and_very_long_ones_some_within() -> None:
    prompt = [token for _ in range(100) for token in message(2, 20)] + HEADER
    assert len(places(prompt)) < 30
    assert places([10] * 3000)[:4] == [512, 1024, 1536, 2048]


def test_checkpoints_are_as_far_apart_as_their_cost_demands_and_no_more_than_allowed() -> None:
    prompt = SYSTEM + message(2, 50) + message(3, 50) + message(2, 60) + HEADER
    assert len(places(prompt, min_step=200)) == 1
    assert places(prompt, most=1) == [len(prompt) - len(HEADER)]
    assert all(place > 150 for place in places(prompt, start=150))


def test_placeholders_of_images_are_not_markers() -> None:
    assert places([10] * 50 + [-5] * 300 + [10] * 90, min_step=1) == places([10] * 440, min_step=1)


@ANY_MEMORY
def test_the_next_turn_of_a_conversation_computes_only_what_is_new(kind: str) -> None:
    engine = engine_of(kind)
    text = SYSTEM + message(2, 40)
    assert ask(engine, text + HEADER) == [0]
    for turn in range(3):
        answer = reference(text + HEADER, greedy(4, ignore_eos=True))[0]
        known = len(text) + len(HEADER) + 3  # the last token of an answer is not computed
        text = text + HEADER + answer + message(2, 30 + turn)
        assert ask(engine, text + HEADER) == [known]


@ANY_MEMORY
def test_an_answer_that_comes_back_in_another_form_costs_only_itself(kind: str) -> None:
    engine = engine_of(kind)
    text = SYSTEM + message(2, 40)
    ask(engine, text + HEADER)
    for turn in range(3):
        known, text = len(text), [*text, *HEADER, 30, 31, 32, *message(2, 30 + turn)]
        assert ask(engine, text + HEADER) == [known]


@ANY_MEMORY
def test_conversations_with_one_system_prompt_compute_it_once(kind: str) -> None:
    engine = engine_of(kind)
    taken = [ask(engine, SYSTEM + message(20 + i, 30) + HEADER)[0] for i in range(5)]
    assert taken[0] == 0
    assert min(taken[1:]) >= 0.95 * len(SYSTEM)


@ANY_MEMORY
def test_where_texts_part_a_checkpoint_stays(kind: str) -> None:
    engine = engine_of(kind)
    common = [11, 12] * 60
    first, *others = (ask(engine, common + [20 + i] * 100)[0] for i in range(4))
    assert first == 0
    assert others[1:] == [len(common)] * 2


@ANY_MEMORY
def test_concurrent_prompts_with_a_common_prefix_compute_it_once(kind: str) -> None:
    engine = engine_of(kind)
    assert ask(engine, *([*SYSTEM, *[30 + i] * 5] for i in range(4))) == [0, *[len(SYSTEM)] * 3]
    assert ask(engine, *([*SYSTEM, *[40 + i] * 5] for i in range(4))) == [len(SYSTEM)] * 4


@ANY_MEMORY
def test_samples_of_one_prompt_read_it_once(kind: str) -> None:
    assert ask(engine_of(kind), *[SYSTEM] * 4) == [0, *[len(SYSTEM) - 1] * 3]


@WITH_CELLS
def test_a_window_that_has_all_of_its_cells_needs_no_checkpoint(kind: str) -> None:
    engine = engine_of(kind, keeps=50, ctx_checkpoints=0)
    ask(engine, [11] * 100)
    assert ask(engine, [11] * 80 + [12] * 10) == [80]
    assert ask(engine, [11] * 20 + [12] * 10) == [0]


def test_sequences_share_the_cells_up_to_a_checkpoint() -> None:
    engine = engine_of("cells and states", n_ctx=1024)
    ask(engine, SYSTEM + message(2, 10) + HEADER)
    for i in range(3):
        engine.add_request(SYSTEM + message(20 + i, 10) + HEADER, greedy(40, ignore_eos=True))
    for _ in range(12):
        engine.step()
    assert engine.core.kv.n_used < len(SYSTEM) + 3 * 60
    drain(engine)


@ANY_MEMORY
def test_checkpoints_are_for_requests_of_the_same_salt_only(kind: str) -> None:
    engine = engine_of(kind)
    ask(engine, SYSTEM + message(2, 30) + HEADER, cache_salt="a")
    assert ask(engine, SYSTEM + message(3, 30) + HEADER, cache_salt="b") == [0]
    assert ask(engine, SYSTEM + message(3, 30) + HEADER, cache_salt="a")[0] >= len(SYSTEM)


@ANY_MEMORY
def test_a_request_that_does_not_cache_its_prompt_leaves_no_checkpoint(kind: str) -> None:
    engine = engine_of(kind)
    ask(engine, SYSTEM + message(2, 30) + HEADER, cache_prompt=False)
    assert engine.stats().prefix_cache_bytes == 0
    assert ask(engine, SYSTEM + message(3, 30) + HEADER) == [0]


@ANY_MEMORY
@pytest.mark.parametrize("setting", ["ctx_checkpoints", "prefix_cache_ram"])
def test_without_checkpoints_or_host_memory_nothing_is_kept_and_texts_are_right(kind: str, setting: str) -> None:
    engine = engine_of(kind, **{setting: 0})
    for i in range(3):
        ask(engine, SYSTEM + message(20 + i, 30) + HEADER)
    assert not engine.core.kv.cache.checkpoints


@ANY_MEMORY
def test_host_memory_is_bounded_and_what_is_used_stays(kind: str) -> None:
    engine = engine_of(kind, prefix_cache_ram=6)  # six whole states, or 24 checkpoints, of the fake
    for i in range(12):
        ask(engine, SYSTEM + message(20 + i, 20) + HEADER)
        ask(engine, [20 + i] * 90)
        assert engine.stats().prefix_cache_bytes <= 6 << 20
    assert ask(engine, SYSTEM + message(4, 10) + HEADER)[0] >= 0.95 * len(SYSTEM)
    engine.clear_prefix_cache()
    assert (engine.stats().prefix_cache_bytes, context_of(engine).n_used) == (0, 0)


@ANY_MEMORY
def test_a_checkpoint_that_cannot_be_restored_costs_time_and_no_text(kind: str) -> None:
    engine = engine_of(kind)
    ask(engine, SYSTEM + message(2, 30) + HEADER)
    context_of(engine).fail_restore = True
    ask(engine, SYSTEM + message(3, 30) + HEADER)
