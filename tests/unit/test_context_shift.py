"""Context shift: a text continues when its context is full, whatever else runs, is swapped out or fails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from cppbatch import BatchInferenceEngine, FinishReason, GenerationEvent, SamplingParams
from cppbatch.config import Sharing
from cppbatch.engine.kv.layout_policy import LayoutSwitch
from cppbatch.engine.kv.prefix_cache import ReuseCosts
from cppbatch.engine.request import GenerationRequest, ResumeState
from cppbatch.errors import DecodeFailed, InvalidRequest
from tests.support.fakes import (
    EOG,
    LIKELIEST_FIRST,
    FakeProposer,
    context_of,
    drain,
    fake_engine,
    greedy,
    mood,
    spell,
    tokens_of,
)
from tests.support.randomised import randomised

N_CTX = 24
LONG = 60
COSTS = ReuseCosts(share=1, copy=2, min_cached=2, worth_waiting=3)


def shifted(prompt: list[int], n: int, *, n_ctx: int = N_CTX, n_keep: int = 0, n_discard: int = 0) -> list[int]:
    """The fake model's `n` most likely tokens, if a full context drops tokens by llama-server's rule."""
    context = list(prompt)
    tokens: list[int] = []
    keep = min(len(prompt) if n_keep < 0 else n_keep, n_ctx - 4)
    while len(tokens) < n:
        if len(context) == n_ctx:
            n_left = len(context) - 1 - keep
            n_gone = max(1, min(n_discard or n_left // 2, n_left - 1))
            del context[keep : keep + n_gone]
        token = next(t for t in LIKELIEST_FIRST[mood(bytes(context))] if t not in EOG)
        tokens.append(token)
        context.append(token)
    return tokens


def endless(n: int = LONG, **others: Any) -> SamplingParams:
    return greedy(n, ignore_eos=True, **others)


def shifting_engine(n_ctx: int = N_CTX, **others: Any) -> BatchInferenceEngine:
    return fake_engine(n_ctx=n_ctx, **{"context_shift": True, "n_parallel": 1, "reuse_costs": COSTS, **others})


def text(engine: BatchInferenceEngine, prompt: list[int], params: SamplingParams, **options: Any) -> list[int]:
    name = engine.add_request(prompt, params, **options)
    events = drain(engine)
    engine.core.kv.check()
    return tokens_of(events, name)


# --- one text ---------------------------------------------------------------------------------------------------------


def test_without_context_shift_a_text_ends_where_the_context_is_full() -> None:
    engine = fake_engine(n_ctx=N_CTX, n_parallel=1)
    assert len(text(engine, [1, 2, 3], endless(LONG), clamp_max_tokens=True)) == N_CTX - 3
    with pytest.raises(InvalidRequest, match="max_tokens"):
        engine.add_request([1, 2, 3], endless(LONG))


@pytest.mark.parametrize("n_discard", [0, 1, 5, 1000])
@pytest.mark.parametrize("n_keep", [0, 2, -1, 1000])
def test_a_full_context_drops_tokens_as_in_llama_server_and_the_text_continues(n_keep: int, n_discard: int) -> None:
    engine = shifting_engine()
    tokens = text(engine, [1, 2, 3, 4], endless(), n_keep=n_keep, n_discard=n_discard)
    assert tokens == shifted([1, 2, 3, 4], LONG, n_keep=n_keep, n_discard=n_discard)
    assert context_of(engine).n_shifted == engine.stats().context_shifts > 0
    assert max(map(len, context_of(engine).cells)) <= N_CTX


@pytest.mark.parametrize("context_shift", [False, True])
def test_a_looping_text_ends_after_the_default_maximum_and_after_minus_one_with_the_context(
    monkeypatch: pytest.MonkeyPatch, *, context_shift: bool
) -> None:
    """One rule for the command line, Python and the terminal."""
    monkeypatch.setattr("cppbatch.engine.input_processor.DEFAULT_MAX_TOKENS", 9)
    engine = fake_engine(n_ctx=N_CTX, n_parallel=1, context_shift=context_shift, n_ctx_train=100)

    def n_tokens(n: int | None, **others: Any) -> int:
        return len(text(engine, [1, 2, 3], SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, **others)))

    assert n_tokens(None) == 9
    assert n_tokens(None, min_tokens=12) == 12
    assert n_tokens(-1) == (100 if context_shift else N_CTX - 3)
    monkeypatch.setattr("cppbatch.engine.input_processor.DEFAULT_MAX_TOKENS", 4096)
    assert context_shift or n_tokens(None) == N_CTX - 3  # what the context has, without an error


def test_keep_is_the_default_of_requests_without_n_keep() -> None:
    assert text(shifting_engine(n_keep=3), [1, 2, 3, 4], endless()) == shifted([1, 2, 3, 4], LONG, n_keep=3)


def test_the_prompt_may_be_dropped_too() -> None:
    prompt = list(range(1, N_CTX))  # one token fits after it
    assert text(shifting_engine(), prompt, endless()) == shifted(prompt, LONG)


def test_a_prompt_that_fills_the_context_is_still_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt: has 24 tokens"):
        shifting_engine().add_request(list(range(24)), endless())


def test_the_usage_counts_the_whole_text_and_its_shifts() -> None:
    engine = shifting_engine()
    engine.add_request([1, 2, 3], endless())
    usage = drain(engine)[-1].usage
    assert usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, LONG)
    assert usage.context_shifts == engine.stats().context_shifts


def test_where_cells_cannot_be_shifted_the_context_is_computed_again() -> None:
    engine = shifting_engine(sharing="whole")
    assert text(engine, [1, 2, 3, 4], endless()) == shifted([1, 2, 3, 4], LONG)
    assert context_of(engine).n_shifted == 0
    assert engine.stats().context_shifts > 0


def test_the_samplers_see_the_dropped_tokens() -> None:
    """A penalty on the last tokens, of which most were just dropped from the context."""
    seen: list[int] = []
    engine = shifting_engine()

    def look(tokens: Any, row: Any) -> None:
        seen[:] = tokens.tolist()

    params = greedy(LONG, ignore_eos=True, logits_processor=look)
    tokens = text(engine, [1, 2, 3], params)
    assert seen == [1, 2, 3, *tokens[:-1]]


@pytest.mark.parametrize("n_discard", [0, 1000])
@pytest.mark.parametrize("n_keep", [0, 10, 1000])
def test_tokens_that_a_grammar_forces_stop_at_the_end_of_the_context(n_keep: int, n_discard: int) -> None:
    """And those that are dropped may not be computed yet."""
    engine = shifting_engine(n_batch=64)
    expected = "dponmlkjihgfe" * 6
    name = engine.add_request([1, 2], endless(100, guided_regex=expected), n_keep=n_keep, n_discard=n_discard)
    events = drain(engine)
    assert tokens_of(events, name) == spell(expected)
    assert events[-1].finish_reason is FinishReason.STOP
    assert engine.stats().forced_tokens > 15
    assert engine.stats().context_shifts > 1


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_shared_cells_are_not_shifted_under_another_sequence() -> None:
    """Two texts share all but the end of a prompt. Both drop a part of it: one in its own cells, one computes again."""
    engine = shifting_engine(n_ctx=2 * N_CTX, n_ctx_train=N_CTX, n_parallel=2, sharing="cells", prefix_cache_ram=0)
    prompt = list(range(1, 17))
    names = [engine.add_request([*prompt, last], endless(40)) for last in (30, 31)]
    events = drain(engine)
    for name, last in zip(names, (30, 31), strict=True):
        assert tokens_of(events, name) == shifted([*prompt, last], 40)
    stats = engine.stats()
    assert context_of(engine).n_shifted < stats.context_shifts


@pytest.mark.parametrize("n_keep", [0, 6])
def test_only_the_kept_tokens_of_a_shifted_text_become_a_prefix(n_keep: int) -> None:
    """The keys and values after them have seen dropped tokens: they are not those of a prompt."""
    engine = shifting_engine(n_ctx=2 * N_CTX, n_ctx_train=N_CTX, sharing="cells")
    prompt = [1, 2, 3, 4, 5, 6, 7]
    tokens = text(engine, prompt, endless(30), n_keep=n_keep)
    assert engine.core.kv.n_cached == n_keep
    again = (prompt + tokens)[: N_CTX - 2]
    engine.add_request(again, endless(1))
    usage = drain(engine)[-1].usage
    assert usage
    assert usage.cached_tokens == n_keep


def test_a_running_shifted_text_shares_only_its_kept_tokens() -> None:
    engine = shifting_engine(n_ctx=4 * N_CTX, n_ctx_train=N_CTX, n_parallel=2, sharing="cells")
    engine.add_request([1, 2, 3, 4, 5, 6], endless(), n_keep=4)
    while not engine.stats().context_shifts:
        engine.step()
    (sequence,) = engine.core.scheduler.running
    again = sequence.tokens[: sequence.n_tokens].tolist()
    name = engine.add_request(again, endless(1))
    usage = next(event.usage for event in drain(engine) if event.request_id == name and event.usage)
    assert usage.cached_tokens == 4


def test_with_deterministic_nothing_is_shifted_in_its_cells() -> None:
    """Whether cells are shared depends on the other sequences, and the text must not."""
    engine = shifting_engine(unified=False, deterministic=True)
    assert text(engine, [1, 2, 3, 4], endless()) == shifted([1, 2, 3, 4], LONG)
    assert context_of(engine).n_shifted == 0


# --- another engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_known", [0, 1, N_CTX - 5, N_CTX - 4, N_CTX - 3, 35, 59])
def test_a_text_continues_in_another_engine_after_a_crash(n_known: int) -> None:
    prompt = [1, 2, 3, 4]
    expected = shifted(prompt, LONG, n_keep=2)
    engine = shifting_engine()
    request = GenerationRequest(id="a", prompt=prompt, params=endless(), n_keep=2)
    state = ResumeState(tokens=expected[:n_known], age=1.0, first_token_seconds=0.5)
    engine.add(engine.prepare(request, state))
    assert tokens_of(drain(engine), "a") == expected[n_known:]


# --- any schedule -----------------------------------------------------------------------------------------------------

Asked = tuple[list[int], int, int, int, bool]

BEGINNINGS = (b"", b"\1" * 5, b"\1" * 5 + b"\2" * 4, b"\1" * 12, b"\4\5\6\7\x08\x09")


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    prompt = draw(st.sampled_from(BEGINNINGS)) + draw(st.binary(min_size=1, max_size=3))
    return (
        [byte % min(EOG) for byte in prompt],
        draw(st.integers(1, 50)),
        draw(st.sampled_from((0, 0, 3, 7, -1, 99))),
        draw(st.sampled_from((0, 0, 1, 4, 99))),
        draw(st.booleans()),
    )


ACTIONS = st.lists(
    st.one_of(requests(), requests(), st.just("step"), st.just("step"), st.just("switch"), st.integers(1, 6)),
    min_size=3,
    max_size=16,
)
MEMORIES: st.SearchStrategy[tuple[bool, Sharing]] = st.sampled_from(
    ((True, "cells"), (True, "cells"), (True, "whole"), (True, "none"), (False, "copy"), (False, "copy"),
     (False, "whole"), (False, "none"))
)  # fmt: skip


@randomised(
    ring=40,
    nightly=120,
    soak=1000,
    actions=ACTIONS,
    memory=MEMORIES,
    limit=st.sampled_from((18, 20, 27)),
    sizes=st.fixed_dictionaries(
        {
            "n_ctx": st.sampled_from((27, 40, 81)),
            "swap_space": st.sampled_from((0, 1, 1024)),
            "prefix_cache_ram": st.sampled_from((0, 1, 1024)),
            "drafts": st.booleans(),
            "switches": st.booleans(),
            "failing_step": st.sampled_from((0, 0, 0, 5, 30)),
        }
    ),
)
def test_in_any_schedule_every_text_is_the_one_it_would_be_alone(
    actions: list[Any], memory: tuple[bool, Sharing], limit: int, sizes: dict[str, Any]
) -> None:
    """`limit`: tokens of a text at most, of which the unified layout has room for one or more. `failing_step`: the step
    that fails."""
    unified, sharing = memory
    failing_step, proposers = sizes.pop("failing_step"), [FakeProposer()] if sizes.pop("drafts") else []
    switches = sizes["switches"] = sizes["switches"] and sharing != "cells"
    if switches or not unified:
        sizes["n_ctx"] = 81
    engine = shifting_engine(
        n_ctx_train=limit, n_parallel=3, n_batch=6, unified=unified, sharing=sharing, n_more_ids=2,
        proposers=proposers, **sizes,
    )  # fmt: skip
    if failing_step:
        context_of(engine).fail_at[failing_step] = DecodeFailed(-3, "made to fail")
    asked: dict[str, Asked] = {}
    events: list[GenerationEvent] = []
    for action in [*actions, *["step"] * 2000]:
        if action == "step":
            if not engine.has_work:
                continue
            events += engine.step()
        elif action == "switch":
            if policy := engine.core._layout_policy:
                engine.core._switch_layout(
                    policy, LayoutSwitch("per-sequence" if engine.core.kv.unified else "unified", "test")
                )
        elif isinstance(action, int):
            engine.cancel(f"request-{action}")
        else:
            prompt, n, n_keep, n_discard, cache = action
            options: dict[str, Any] = {"n_keep": n_keep, "n_discard": n_discard, "cache_prompt": cache}
            asked[engine.add_request(prompt, endless(n), **options)] = action
        engine.core.kv.check()
        assert context_of(engine).n_used == engine.core.kv.n_used + engine.core.kv.n_cached
    assert not engine.has_work
    assert sum(event.finish_reason is not None for event in events) == len(asked)
    for name, (prompt, n, n_keep, n_discard, _) in asked.items():
        tokens, last = tokens_of(events, name), [event for event in events if event.request_id == name][-1]
        expected = shifted(prompt, n, n_ctx=limit, n_keep=n_keep, n_discard=n_discard)
        if last.finish_reason is FinishReason.LENGTH:
            assert tokens == expected
        else:
            assert last.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)
            assert tokens == expected[: len(tokens)]
    engine.clear_prefix_cache()
    assert context_of(engine).n_used == 0
    assert engine.stats().seq_ids_free == engine.stats().seq_ids
    assert not any(proposer.known for proposer in proposers)
