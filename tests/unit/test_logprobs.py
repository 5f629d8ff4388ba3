"""Log-probabilities over a fake model: exact regardless of caching, batching and preemption."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from cppbatch import Completion, SamplingParams
from cppbatch.config import Sharing
from cppbatch.engine.request import TokenLogprob, mean_logprob
from cppbatch.engine.sampling.random_sampling import filter_logits
from cppbatch.engine.sampling.token_logprobs import PostSamplingLogprobs, RowLogprobs
from cppbatch.engine.sampling_plan import Filters
from cppbatch.llama import Batch
from tests.support import fakes
from tests.support.distributions import DEFAULTS, exact, logits
from tests.support.fakes import EOG, LOGITS, PIECES, FakeContext, drain, fake_engine, greedy, mood
from tests.support.randomised import randomised

Rows = npt.NDArray[np.float64]

EXACT = 1e-4

N_TOPS = (None, 0, 1, 20)


class ScoringContext(FakeContext):
    """Gives logits for many tokens of a sequence in one decode, as a prompt that is scored needs them."""

    def _write(self, batch: Batch, seq_ids: list[int]) -> None:
        wanted, n_outputs = batch.wants_logits, batch.n_outputs
        rows = np.flatnonzero(wanted[: batch.n_tokens]).tolist()
        last = {seq_ids[i]: i for i in rows}.values()
        batch.wants_logits, batch.n_outputs = np.zeros_like(wanted), len(last)
        batch.wants_logits[list(last)] = 1
        super()._write(batch, seq_ids)
        batch.wants_logits, batch.n_outputs = wanted, n_outputs
        assert len(rows) == n_outputs
        self._moods = [mood(self.cells[seq_ids[i]][: int(batch.positions[i]) + 1]) for i in rows]


@pytest.fixture(autouse=True, scope="module")
def scoring() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakes, "FakeContext", ScoringContext)
        yield


def log_softmax(rows: npt.NDArray[np.float32]) -> Rows:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: Rows = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


def hashed(tokens: list[int]) -> Rows:
    """The same of the fake model."""
    return log_softmax(LOGITS[[mood(bytes(tokens[: i + 1])) for i in range(len(tokens))]])


def assert_those_of(
    rows: Rows, tokens: list[int], entries: list[TokenLogprob], *, n_top: int, within: float = EXACT
) -> None:
    """`entries` are those of the last `tokens`, and equal the row before each."""
    first = len(tokens) - len(entries)
    assert [entry.token for entry in entries] == tokens[first:]
    for i, entry in enumerate(entries, first):
        if i == 0:
            assert (entry.logprob, entry.top) == (None, [])
            continue
        row = rows[i - 1]
        assert entry.logprob == pytest.approx(row[entry.token], abs=within)
        ids, values = [token for token, _, _ in entry.top], [logprob for _, _, logprob in entry.top]
        assert len(set(ids)) == n_top
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row[ids].tolist(), abs=within)
        assert values == pytest.approx(np.sort(row)[::-1][:n_top].tolist(), abs=within)


def assert_hashed(result: Completion, prompt: list[int], params: SamplingParams) -> None:
    """Exact, of the fake model."""
    n_ends = result.usage.completion_tokens - len(result.tokens)
    n = len(result.tokens) + (len(prompt) if params.echo else 0) + n_ends
    assert len(result.logprobs) == (0 if params.logprobs is None else n)
    tokens = prompt + result.tokens
    if n_ends and result.logprobs:
        tokens.append(result.logprobs[-1].token)
        assert tokens[-1] in EOG
    assert_those_of(hashed(tokens), tokens, result.logprobs, n_top=params.logprobs or 0)


# --- one row ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0, 0.01, 1, 30, 1000])
@pytest.mark.parametrize("shift", [0, -500, 1e4])
def test_a_row_of_49152_logits_is_normalised_as_in_float64(spread: float, shift: float) -> None:
    row = (np.random.default_rng(1).standard_normal(49_152) * spread + shift).astype(np.float32)
    likelihoods, exact = RowLogprobs(row.copy(), 20), log_softmax(row[None])[0]
    for token in (0, 7, int(row.argmax()), int(row.argmin())):
        assert likelihoods.of(token) == pytest.approx(exact[token], abs=EXACT)
    assert [logprob for _, logprob in likelihoods.top()] == pytest.approx(np.sort(exact)[::-1][:20].tolist(), abs=EXACT)


def test_later_changes_of_a_row_have_no_effect() -> None:
    row = np.arange(100, dtype=np.float32)
    likelihoods = RowLogprobs(row, 3)
    before = likelihoods.of(5), likelihoods.top()
    row[:] = -np.inf
    assert (likelihoods.of(5), likelihoods.top()) == before
    assert [token for token, _ in before[1]] == [99, 98, 97]


# --- a fake model with logits that do not depend on the batch: always exact ------------------------------------------


def test_in_a_batch_with_others_each_number_of_top_logprobs_is_exact() -> None:
    prompts = [[i, 2 * i, 3] for i in range(12)]
    params = [greedy(5, ignore_eos=True, logprobs=N_TOPS[i % 4], echo=i % 2 == 0) for i in range(12)]
    results = fake_engine().generate(prompts, params)
    for prompt, its, result in zip(prompts, params, results, strict=True):
        assert_hashed(result, prompt, its)


@pytest.mark.parametrize("temperature", [0, 5])
@pytest.mark.parametrize("n_top", [0, 20])
def test_requesting_logprobs_changes_no_text(temperature: float, n_top: int) -> None:
    def tokens(logprobs: int | None) -> list[list[int]]:
        params = [
            SamplingParams(temperature=temperature, top_k=0, seed=i, max_tokens=12, logprobs=logprobs)
            for i in range(12)
        ]
        return [result.tokens for result in fake_engine().generate([[i, 2 * i, 3] for i in range(12)], params)]

    assert tokens(n_top) == tokens(None)


# --- after sampling


@pytest.mark.parametrize("n", [250, 3000])
@pytest.mark.parametrize(
    "filters",
    [
        DEFAULTS,
        Filters(0, 1.0, 0.0, 1.5),
        Filters(0, 0.9, 0.0, 1.0),
        Filters(0, 1.0, 0.1, 2.0),
        Filters(7, 0.9, 0.0, 0.1),
    ],
)
def test_after_sampling_they_are_the_distribution_that_the_filters_leave(filters: Filters, n: int) -> None:
    row = logits(n)
    its, expected = PostSamplingLogprobs(*filter_logits(row, filters), 20), exact(row, filters)
    left = np.flatnonzero(expected)
    assert [np.exp(its.of(token)) for token in left.tolist()] == pytest.approx(expected[left].tolist(), rel=1e-5)
    ids = [token for token, _ in its.top()]
    assert ids == np.argsort(-expected, kind="stable")[: min(20, len(left))].tolist()


def test_after_sampling_a_greedy_token_is_certain() -> None:
    (result,) = fake_engine().generate([[1, 2]], greedy(4, ignore_eos=True, logprobs=5, post_sampling_probs=True))
    assert [(entry.logprob, len(entry.top)) for entry in result.logprobs] == [(0.0, 1)] * 4
    assert [entry.top[0][0] for entry in result.logprobs] == result.tokens


def test_after_sampling_they_change_no_text_and_those_of_other_requests_stay_the_models() -> None:
    def tokens(*, post_sampling_probs: bool) -> list[list[int]]:
        params = [
            SamplingParams(seed=i, top_k=4, max_tokens=8, logprobs=6, post_sampling_probs=post_sampling_probs and i > 0)
            for i in range(3)
        ]
        results = fake_engine().generate([[i, 3] for i in range(3)], params)
        for result in results[1:]:
            for entry in result.logprobs:
                total = sum(np.exp(logprob) for _, _, logprob in entry.top)
                assert (len(entry.top) <= 4, total == pytest.approx(1)) == (post_sampling_probs, post_sampling_probs)
        assert all(len(entry.top) == 6 for entry in results[0].logprobs)
        return [result.tokens for result in results]

    assert tokens(post_sampling_probs=True) == tokens(post_sampling_probs=False)


@pytest.mark.parametrize("sharing", ["cells", "copy", "whole", "none"])
def test_prompts_are_scored_exactly_whatever_is_cached(sharing: Sharing) -> None:
    unified = sharing != "copy"
    engine = fake_engine(n_ctx=256, n_parallel=2, unified=unified, sharing=sharing)
    prompt = [1, 2, 3] * 12
    engine.generate([prompt], greedy(4))
    for params in (greedy(4, logprobs=2, echo=True), greedy(4, logprobs=2), greedy(0, logprobs=2, echo=True)):
        for its in (prompt, prompt[:30], [*prompt[:30], 9, 9]):
            (result,) = engine.generate([its], params)
            assert_hashed(result, its, params)


@pytest.mark.parametrize("swap_space", [1024, 0], ids=["swapped", "recomputed"])
def test_scoring_continues_where_a_preemption_stopped_it(swap_space: int) -> None:
    engine = fake_engine(n_parallel=1, swap_space=swap_space)
    prompt, params = [5, 6, 7] * 10, greedy(3, ignore_eos=True, logprobs=2, echo=True)
    engine.add_request(prompt, params, request_id="low", priority=1)
    events = engine.step() + engine.step()
    assert 0 < len(engine.core.sequences["low"].prompt_logprobs) < len(prompt)
    engine.add_request([1], greedy(2, ignore_eos=True), request_id="high")
    events += drain(engine)
    assert [event.request_id for event in events if event.finish_reason] == ["high", "low"]
    assert engine.stats().swaps + engine.stats().recomputes == 1
    its = [event for event in events if event.request_id == "low"]
    entries = [entry for event in its for entry in event.logprobs]
    tokens = prompt + [token for event in its for token in event.tokens]
    assert len(entries) == len(tokens)
    assert_those_of(hashed(tokens), tokens, entries, n_top=2)


@st.composite
def wishes(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    prompt = draw(st.lists(st.integers(0, min(EOG) - 1), min_size=1, max_size=30))
    echo = draw(st.booleans())
    return prompt, greedy(
        draw(st.integers(0 if echo else 1, 46 - len(prompt))),
        echo=echo,
        logprobs=draw(st.none() | st.integers(0, 20)),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from(((), ("a",), ("ab", "é")))),
        include_stop=draw(st.booleans()),
        logit_bias=draw(st.sampled_from(({}, {3: 5.0, "d": -100.0}))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.5))),
    )


@randomised(
    ring=20,
    nightly=60,
    soak=200,
    wanted=st.lists(wishes(), min_size=1, max_size=8),
    n_batch=st.integers(3, 70),
    swap_space=st.sampled_from((0, 1024)),
    sharing=st.sampled_from(("cells", "whole", "none")),
)
def test_scores_are_exact_in_any_crowd(
    wanted: list[tuple[list[int], SamplingParams]], n_batch: int, swap_space: int, sharing: Sharing
) -> None:
    engine = fake_engine(n_ctx=48, n_parallel=3, n_batch=n_batch, swap_space=swap_space, sharing=sharing)
    results = engine.generate([prompt for prompt, _ in wanted], [params for _, params in wanted])
    for (prompt, params), result in zip(wanted, results, strict=True):
        assert_hashed(result, prompt, params)


# --- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"stop": ("ab", "b a")}, {"stop": ("a",), "include_stop": True}])
def test_the_events_of_a_stream_add_up_to_the_whole(more: dict[str, Any]) -> None:
    params = greedy(20, ignore_eos=True, logprobs=2, **more)
    for first in range(20):
        engine = fake_engine()
        (whole,) = engine.generate([[first, 1, 2]], params)
        events = list(engine.stream([first, 1, 2], params))
        assert [entry for event in events for entry in event.logprobs] == whole.logprobs
        assert "".join(event.text for event in events) == whole.text
        for event in events[bool(params.echo) :]:
            assert [entry.token for entry in event.logprobs] == event.tokens


def test_an_echo_comes_first_and_with_its_scores() -> None:
    first, *others = fake_engine().stream([1, 2, 3], greedy(3, ignore_eos=True, logprobs=0, echo=True))
    prompt = b"".join(PIECES[token] for token in (1, 2, 3)).decode()
    assert first.text.startswith(prompt)
    assert [entry.token for entry in first.logprobs] == [1, 2, 3, *first.tokens]
    assert [len(event.logprobs) for event in others] == [len(event.tokens) for event in others]


def test_an_echo_without_log_probabilities_is_only_text() -> None:
    (plain,) = fake_engine().generate([[1, 2, 3]], greedy(6, ignore_eos=True))
    (echoed,) = fake_engine().generate([[1, 2, 3]], greedy(6, ignore_eos=True, echo=True))
    assert echoed.text == b"".join(PIECES[token] for token in (1, 2, 3)).decode() + plain.text
    assert (echoed.tokens, echoed.logprobs) == (plain.tokens, [])


def test_a_text_that_ends_at_once_still_echoes_its_prompt() -> None:
    first = fake_engine().generate([[1, 2, 3]], greedy(1, ignore_eos=True))[0].tokens[0]
    (result,) = fake_engine().generate([[1, 2, 3]], greedy(6, echo=True, logprobs=1, stop_token_ids=(first,)))
    assert (result.tokens, result.finish_reason) == ([], "stop")
    assert [entry.token for entry in result.logprobs] == [1, 2, 3, first]
    assert result.text == b"".join(PIECES[token] for token in (1, 2, 3)).decode()


# --- the end token ---------------------------------------------------------------------------------------------------


def ending(prompt: list[int], **more: Any) -> tuple[Completion, int]:
    """A text that ends at its third token, and that token."""
    *_, last = fake_engine().generate([prompt], greedy(3, ignore_eos=True))[0].tokens
    (result,) = fake_engine().generate([prompt], greedy(9, ignore_eos=True, stop_token_ids=(last,), **more))
    return result, last


@pytest.mark.parametrize("echo", [False, True])
def test_the_end_token_is_listed_after_the_text_and_counted_but_has_no_text(echo: bool) -> None:
    prompt = [1, 2, 3]
    result, last = ending(prompt, logprobs=2, echo=echo)
    tokens = [*prompt, *result.tokens, last]
    assert (result.finish_reason, len(result.tokens), result.usage.completion_tokens) == ("stop", 2, 3)
    assert [entry.token for entry in result.logprobs] == tokens[0 if echo else 3 :]
    assert_those_of(hashed(tokens), tokens, result.logprobs, n_top=2)
    assert result.logprobs[-1].text_offset == len(result.text)


def test_the_end_token_is_counted_without_log_probabilities_too() -> None:
    result, _ = ending([1, 2, 3])
    assert (result.logprobs, len(result.tokens), result.usage.completion_tokens) == ([], 2, 3)


def test_of_a_text_that_ends_otherwise_only_its_own_tokens_are_listed() -> None:
    (cut,) = fake_engine().generate([[1, 2, 3]], greedy(3, ignore_eos=True, logprobs=0))
    stop = PIECES[cut.tokens[2]].decode("utf-8", "replace")
    (stopped,) = fake_engine().generate([[1, 2, 3]], greedy(9, ignore_eos=True, logprobs=0, stop=(stop,)))
    for result in (cut, stopped):
        assert len(result.logprobs) == len(result.tokens) == result.usage.completion_tokens


def test_best_of_weighs_all_log_probabilities_if_inserted_tokens_have_none() -> None:
    logprobs = [TokenLogprob(token=1, piece=b"a", logprob=float(-i)) for i in range(5)]
    assert mean_logprob(logprobs, 8) == -2.0


def test_best_of_weighs_the_end_token_as_any_other() -> None:
    (result,) = fake_engine().generate([[1, 2, 3]], greedy(40, logprobs=0, logit_bias={min(EOG): 3.0}))
    assert result.finish_reason == "stop"
    assert mean_logprob(result.logprobs, result.usage.completion_tokens) == pytest.approx(
        np.mean([entry.logprob or 0 for entry in result.logprobs])
    )
