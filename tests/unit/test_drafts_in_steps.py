"""Drafts in the step: they change the number of tokens per step, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cppbatch import BatchInferenceEngine, Completion, SamplingParams
from cppbatch.engine.speculation.proposer import GrammarProposer
from cppbatch.errors import DecodeFailed
from tests.support.fakes import PIECES, FakeProposer, FakeVocab, context_of, drain, fake_engine, greedy, know

SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
    {"temperature": 0.8, "seed": 6, "top_p": 0.7, "presence_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "stop": ("ab",)},
    {"temperature": 0.0, "guided_regex": "[a-f]{3}abcdefabcdef[a-z]*"},
]


def engine(drafts: bool, **settings: Any) -> BatchInferenceEngine:
    proposers = [FakeProposer()] if drafts else []
    its = fake_engine(n_ctx=1600, n_batch=256, n_parallel=8, proposers=proposers, **settings)
    know(its, {1: 0.010, 256: 0.011})  # drafts cost next to nothing
    return its


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("may_pad", [True, False])
@pytest.mark.parametrize("settings", SAMPLERS, ids=lambda settings: " ".join(map(str, settings)))
def test_texts_are_those_without_drafts(unified: bool, may_pad: bool, settings: dict[str, Any]) -> None:
    settings = settings if "guided_regex" in settings else settings | {"ignore_eos": True}
    params = [SamplingParams(max_tokens=10 + 7 * i, **settings) for i in range(7)]
    prompts = [[i, 1, 2] for i in range(7)]
    plain = engine(False, unified=unified, may_pad=may_pad).generate(prompts, params)
    fast = engine(True, unified=unified, may_pad=may_pad)
    results = fast.generate(prompts, params)
    for with_drafts, without in zip(results, plain, strict=True):
        assert with_drafts.text == without.text
        assert with_drafts.tokens == without.tokens
        assert with_drafts.logprobs == without.logprobs
        assert with_drafts.finish_reason == without.finish_reason
    stats = fast.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.accepted_tokens == sum(result.usage.accepted_tokens for result in results)
    assert stats.drafted_tokens == sum(result.usage.drafted_tokens for result in results)


def test_an_echoed_prompt_from_the_cache_is_in_the_text_if_the_first_step_has_drafts() -> None:
    prompt, params = [3, 1, 2] * 10, greedy(20, ignore_eos=True, echo=True)
    its, plain = (engine(drafts, sharing="cells") for drafts in (True, False))
    texts = {result.text for each in (its, plain) for _ in range(6) for result in each.generate([prompt], params)}
    assert len(texts) == 1
    assert its.stats().prefix_hit_tokens == 5 * 29
    assert its.stats().accepted_tokens > 0


def test_right_drafts_take_fewer_steps() -> None:
    def n_steps(drafts: bool) -> int:
        its = engine(drafts)
        its.generate([[1, 2]], greedy(60, ignore_eos=True))
        return len(context_of(its).steps)

    assert n_steps(True) < 0.6 * n_steps(False)


def test_a_request_can_turn_drafts_off() -> None:
    its = engine(True)
    results = [
        its.generate([[1, 2]], greedy(60, ignore_eos=True, speculate=speculate))[0] for speculate in (True, False)
    ]
    assert [result.usage.drafted_tokens > 0 for result in results] == [True, False]


def test_drafts_take_only_free_cells() -> None:
    its = fake_engine(n_ctx=32, n_batch=32, n_parallel=4, proposers=[FakeProposer()])
    know(its, {1: 0.010, 32: 0.011})
    results = its.generate([[i, 1] for i in range(4)], greedy(6, ignore_eos=True))
    assert [len(result.tokens) for result in results] == [6] * 4
    assert its.stats().swaps == its.stats().recomputes == 0
    assert its.stats().drafted_tokens > 0


def test_where_sequences_have_streams_all_rows_get_equally_many_tokens_or_none() -> None:
    its = engine(True, unified=False)
    its.generate([[i, 1] for i in range(6)], [greedy(30 + i, ignore_eos=True, speculate=i != 3) for i in range(6)])
    for step in context_of(its).steps[1:]:
        assert len(set(step.values()) - {1}) <= 1
    assert any(set(step.values()) == {n} for step in context_of(its).steps[1:] for n in range(2, 17))


def test_a_failed_step_with_drafts_ends_its_requests_and_no_others() -> None:
    its = engine(True)
    for i in range(3):
        its.add_request([i, 1], greedy(40, ignore_eos=True))
    context_of(its).fail_at[5] = DecodeFailed(-3, "made to fail")
    events = drain(its)
    assert sum(event.finish_reason == "error" for event in events) == 3
    (result,) = its.generate([[0, 1]], greedy(40, ignore_eos=True))
    assert result.tokens == engine(False).generate([[0, 1]], greedy(40, ignore_eos=True))[0].tokens


def test_a_sequence_is_computed_again_if_its_draft_cannot_be_removed() -> None:
    its = engine(True)
    context = context_of(its)
    remove = context.remove
    context.remove = lambda seq_id, start=0, stop=-1: start == 0 and remove(seq_id, start, stop)  # type: ignore[method-assign]
    (result,) = its.generate([[3, 1]], greedy(30, ignore_eos=True))
    assert result.tokens == engine(False).generate([[3, 1]], greedy(30, ignore_eos=True))[0].tokens
    assert its.stats().recomputes > 0


class LetterVocab(FakeVocab):
    """Tokenises each letter from a to p as its own token."""

    def tokenize(self, text: str, **options: Any) -> npt.NDArray[np.int32]:
        return np.array([PIECES.index(letter.encode()) for letter in text], np.int32)


def test_text_that_a_grammar_forces_is_drafted() -> None:
    def result(drafts: bool) -> Completion:
        proposers = [GrammarProposer(LetterVocab())] if drafts else []
        its = fake_engine(n_ctx=400, n_batch=64, proposers=proposers)
        know(its, {1: 0.010, 64: 0.011})
        pattern = "(ab|ba)(cdefghijklmnop){2}[a-z]"
        params = SamplingParams(max_tokens=60, temperature=0, logprobs=1, guided_regex=pattern)
        return its.generate([[1, 2]], params)[0]

    with_drafts, without = result(True), result(False)
    assert with_drafts.tokens == without.tokens
    assert with_drafts.logprobs == without.logprobs
    assert with_drafts.usage.accepted_tokens > 10
