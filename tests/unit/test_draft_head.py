"""The draft head reads the hidden rows of its sequence whatever happens to it, and never changes a text."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, GenerationRequest
from cppbatch.engine.model_info import AdapterInfo
from cppbatch.engine.request import ResumeState
from cppbatch.engine.speculation import speculator
from cppbatch.engine.speculation.draft_cells import DraftCells
from cppbatch.engine.speculation.row_proposer import HiddenRows, RowProposer, most_rows
from cppbatch.errors import DecodeFailed, LlamaError
from tests.support.fake_heads import CONTEXTS, FakeCells, check_head, fake_head
from tests.support.fakes import (
    FakeProposer,
    context_of,
    drain,
    fake_engine,
    greedy,
    know,
    reference,
    run_steps,
    tokens_of,
)
from tests.support.randomised import cases
from tests.support.virtual_time import Clock

STEM = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def engine(*, wrong_each: int = 4, flat: bool = True, kind: str = "mtp", **settings: Any) -> BatchInferenceEngine:
    sizes: dict[str, Any] = {"n_ctx": 400, "n_batch": 64, "n_parallel": 4, "sharing": "cells"} | settings
    its = fake_engine(
        head=lambda context: fake_head(context, Clock(tick=1e-6), wrong_each=wrong_each, kind=kind), **sizes
    )
    if flat:
        know(its, {1: 0.010, 256: 0.011})  # drafts cost next to nothing
    return its


def head_of(its: BatchInferenceEngine) -> tuple[RowProposer, FakeCells]:
    proposer = its.core.runtime.head
    assert proposer
    assert isinstance(proposer._row_context, FakeCells)
    return proposer, proposer._row_context


def cells_of(its: BatchInferenceEngine) -> DraftCells:
    cells = head_of(its)[0].cells
    assert isinstance(cells, DraftCells)
    return cells


@pytest.fixture
def eager() -> Iterator[None]:
    """The head is asked whether that pays or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "_MIN_GAIN", 0.0)
        yield


# --- hidden rows --------------------------------------------------------------------------------------------------


def test_rows_are_those_that_were_put_last() -> None:
    """Against a plain dictionary, through growth, gaps, replaced rows, and more rows than are kept."""
    chance, most = random.Random(0), 20
    for _ in range(200):
        rows, at, value = HiddenRows(2), 0, 0
        expected: dict[int, Any] = {}
        for _ in range(30):
            n = chance.randint(1, 25)
            at = max(0, at - chance.choice((0, 0, 1, 3))) + chance.choice((0, 0, 0, 0, 2))
            new = np.arange(value, value + 2 * n, dtype=np.float32).reshape(n, 2)
            value += 2 * n
            rows.put(at, new, most)
            if at not in range(min(expected, default=0), max(expected, default=-1) + 2):
                expected = {}
            expected = {i: row for i, row in expected.items() if i < at}
            expected |= dict(enumerate(new, at))
            at += n
            if chance.random() < 0.3:
                rows.forget(chance.randint(0, at))
            assert rows.stop == at
            assert rows.stop - rows.start <= most
            for i in range(rows.start, rows.stop):
                assert rows.rows(i, i + 1).tolist() == [expected[i].tolist()]


def test_the_memory_of_kept_rows_is_bounded() -> None:
    assert most_rows(16, 4096) * 16 * 4096 * 4 == 256 << 20
    assert most_rows(256, 16384) == 64
    assert most_rows(1, 64) == 4096


# --- drafts -------------------------------------------------------------------------------------------------------


def test_right_drafts_take_fewer_steps_and_one_decode_of_the_head_is_for_all_sequences() -> None:
    def n_steps(wrong_each: int) -> tuple[int, int]:
        its = engine(wrong_each=wrong_each)
        prompts = [[i, *STEM] for i in range(4)]
        results = its.generate(prompts, greedy(60, ignore_eos=True))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == reference(prompt, greedy(60, ignore_eos=True))[0]
        stats = its.stats()
        assert stats.accepted_tokens > 0.9 * stats.drafted_tokens or wrong_each < 10**9  # the head drafts end tokens
        return len(context_of(its).steps), head_of(its)[1].n_decoded

    plain = fake_engine(n_ctx=400, n_batch=64, n_parallel=4)
    plain.generate([[i, *STEM] for i in range(4)], greedy(60, ignore_eos=True))
    n_without = len(context_of(plain).steps)
    n_right, n_decodes = n_steps(1 << 40)
    assert n_right < 0.3 * n_without
    assert n_decodes < 0.55 * 4 * 60  # one per token of each sequence would be nearly twice as many
    assert n_steps(2)[0] < n_without


def test_a_head_that_is_always_wrong_is_hardly_used() -> None:
    """Drafts of the head take 1% of the time, and the first tries."""
    its = engine(wrong_each=1, flat=False)
    know(its, {1: 0.010, 4: 0.014, 64: 0.070})
    its.generate([[i, *STEM] for i in range(4)], greedy(80, ignore_eos=True))
    assert its.stats().accepted_tokens == 0
    assert its.stats().draft_steps <= 10


def test_a_match_is_taken_where_it_is_better_and_the_head_elsewhere() -> None:
    its = engine(proposers=[FakeProposer(wrong_each=10**9, acceptance=0.98)])
    its.generate([[1, *STEM]], greedy(60, ignore_eos=True))
    assert head_of(its)[1].n_decoded < 10
    its = engine(proposers=[FakeProposer(acceptance=0.3)])
    its.generate([[1, *STEM]], greedy(60, ignore_eos=True))
    assert head_of(its)[1].n_decoded > 10


# --- the life of a sequence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTEXTS)
def test_samples_of_one_prompt_share_the_cells_of_the_head(eager: None, kind: str) -> None:
    its = engine(kind=kind, n_batch=16)
    its.generate([STEM * 3] * 4, [greedy(20, ignore_eos=True, logit_bias={i: 3.0}) for i in range(4)])
    proposer, context = head_of(its)
    check_head(proposer)
    n_cells = sum(map(len, context.cells))
    assert n_cells - context.n_used >= 2 * (len(STEM) * 3 - 1)  # one sequence was tried before the prompt was read


def test_after_a_cached_prefix_the_head_starts_at_the_first_computed_row(eager: None) -> None:
    its = engine(n_parallel=2)
    its.generate([STEM * 3], greedy(4, ignore_eos=True, speculate=False))
    (result,) = its.generate([[*STEM * 3, 20]], greedy(20, ignore_eos=True))
    assert result.usage.cached_tokens == len(STEM * 3)
    assert result.usage.accepted_tokens > 0
    starts = [draft.start for draft in cells_of(its).all if draft.n_cells]
    assert starts == [len(STEM * 3) + 1]


@pytest.mark.parametrize("kind", CONTEXTS)
def test_sequences_with_adapters_or_without_speculation_get_no_drafts_of_the_head(eager: None, kind: str) -> None:
    its = engine(kind=kind, adapters=[AdapterInfo(name="x", path="", scale=1)])
    results = its.generate([[1, *STEM]], greedy(20, ignore_eos=True), lora={"x": 1.0})
    results += its.generate([[2, *STEM]], greedy(20, ignore_eos=True, speculate=False), lora={"x": 0.0})
    assert head_of(its)[1].n_decoded == 0
    assert [result.usage.drafted_tokens for result in results] == [0, 0]
    (result,) = its.generate([[2, *STEM]], greedy(20, ignore_eos=True), lora={"x": 0.0})
    assert result.usage.accepted_tokens > 0


@pytest.mark.parametrize("kind", CONTEXTS)
def test_a_text_that_continues_after_a_crash_is_drafted_for_again(eager: None, kind: str) -> None:
    its, params = engine(kind=kind), greedy(40, ignore_eos=True)
    expected = reference([1, *STEM], params)[0]
    request = GenerationRequest(id="1", prompt=[1, *STEM], params=params)
    its.add(its.prepare(request, ResumeState(tokens=expected[:15], age=0.0, first_token_seconds=0.0)))
    assert tokens_of(drain(its), "1")[-25:] == expected[15:]
    assert its.stats().accepted_tokens > 0


@pytest.mark.parametrize("kind", CONTEXTS)
def test_a_context_that_is_shifted_is_drafted_for_again(eager: None, kind: str) -> None:
    def tokens(drafts: bool) -> list[int]:
        its = engine(kind=kind, n_ctx=48, n_parallel=1, context_shift=True, n_keep=4)
        params = greedy(120, ignore_eos=True, speculate=drafts)
        (result,) = its.generate([[1, *STEM]], params)
        assert result.usage.context_shifts > 1
        assert (result.usage.accepted_tokens > 20) == drafts
        return result.tokens

    assert tokens(True) == tokens(False)


@pytest.mark.parametrize("kind", CONTEXTS)
def test_an_interrupted_decode_of_the_head_changes_no_text(eager: None, kind: str) -> None:
    for at in range(1, 12, 2):
        its, params = engine(kind=kind), greedy(15, ignore_eos=True)
        proposer, context = head_of(its)
        context.fail_at, context.error = at, KeyboardInterrupt()
        for i in range(3):
            its.add_request([i, *STEM], params, request_id=str(i))
        events = []
        while its.has_work:
            try:
                events += its.step()
            except KeyboardInterrupt:
                check_head(proposer)
        for i in range(3):
            assert tokens_of(events, str(i)) == reference([i, *STEM], params)[0]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", CONTEXTS)
def test_after_a_switch_of_the_layout_the_cells_are_empty_and_rows_are_kept(
    eager: None, kind: str, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    its, params = engine(kind=kind), greedy(40, ignore_eos=True)
    proposer, context = head_of(its)
    for i in range(3):
        its.add_request([i, *STEM], params, request_id=str(i))
    events = run_steps(its, 12)
    n_before = context.n_decoded
    assert n_before
    proposer.close_context()
    if fails:
        context.error_of_opening = LlamaError("no memory")
    proposer.open_again()
    assert cells_of(its).n_free == context.n_ctx
    events += drain(its)
    for i in range(3):
        assert tokens_of(events, str(i)) == reference([i, *STEM], params)[0]
    assert (context.n_decoded == n_before) == fails
    assert ("which lost its context: no memory" in caplog.text) == fails


def test_a_head_that_cannot_compute_stops_drafting(eager: None, caplog: pytest.LogCaptureFixture) -> None:
    its, params = engine(), greedy(30, ignore_eos=True)
    _, context = head_of(its)
    context.fail_at, context.error = 6, DecodeFailed(-3, "made to fail")
    with caplog.at_level(logging.ERROR):
        (result,) = its.generate([[1, *STEM]], params)
    assert result.tokens == reference([1, *STEM], params)[0]
    assert "stopped drafting with the draft head, which cannot compute" in caplog.text
    assert context.n_decoded == 6


@cases(ring=8, nightly=50, soak=250)
@pytest.mark.parametrize(("kind", "accepted"), [("mtp", 8), ("chain", 6), ("eagle3", 8), ("dflash", 8)])
def test_in_random_schedules_the_head_gets_the_rows_of_its_text(
    eager: None, kind: str, accepted: int, n_cases: int
) -> None:
    """Cells too few for all sequences, swapped or computed again, prefixes shared, cancelled requests, both layouts.
    The fakes refuse every row that is not of the text before."""
    n_accepted = 0
    for seed in range(n_cases):
        chance = random.Random(seed)
        unified = chance.random() < 0.6
        its = engine(
            kind=kind, n_ctx=chance.choice((44, 60, 120)) * (1 if unified else 3), n_batch=chance.choice((6, 16)),
            n_parallel=3, unified=unified, sharing=chance.choice(("cells" if unified else "copy", "none", "whole")),
            may_pad=chance.random() < 0.5, swap_space=chance.choice((0, 1, 1024)), wrong_each=chance.choice((1, 3, 50)),
            prefix_cache_ram=chance.choice((0, 1024)), proposers=[FakeProposer()] if chance.random() < 0.3 else [],
        )  # fmt: skip
        proposer, _ = head_of(its)
        asked, events = {}, []
        for n in range(chance.randint(4, 10)):
            prompt = STEM[: chance.choice((0, 0, 8, 12))] + [chance.randrange(20) for _ in range(chance.randint(1, 6))]
            params = greedy(chance.randint(1, 24), ignore_eos=True)
            asked[str(n)] = prompt, params
            options: dict[str, Any] = {"cache_prompt": chance.random() < 0.8, "priority": chance.choice((0, 0, 1))}
            its.add_request(prompt, params, request_id=str(n), **options)
            for _ in range(chance.choice((0, 1, 4, 9))):
                events += run_steps(its, 1)
                check_head(proposer)
            if chance.random() < 0.1:
                its.cancel(str(chance.randint(0, n)))
        while its.has_work:
            events += run_steps(its, 1)
            check_head(proposer)
        ended = {event.request_id: event.finish_reason for event in events if event.finish_reason}
        for name, (prompt, params) in asked.items():
            if ended[name] == "length":
                assert tokens_of(events, name) == reference(prompt, params)[0]
        assert not proposer._rows
        n_accepted += its.stats().accepted_tokens
    assert n_accepted > accepted * n_cases
