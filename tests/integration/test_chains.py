"""llama.cpp's own samplers, a chain for each request that wants more than numpy does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from cppbatch import BatchInferenceEngine, Completion, SamplingParams
from cppbatch.engine.params import SAMPLERS
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.sampling.sampler import Sampler
from cppbatch.engine.sampling_plan import Filters, SamplingType, make_sampling_plan
from cppbatch.engine.sequence import Seq
from cppbatch.engine.vocabulary import Vocabulary
from cppbatch.llama import BackendSampling, Model
from tests.support.distributions import assert_drawn_from, exact, softmax
from tests.support.fakes import FakeVocab
from tests.support.fixtures import shared_engine

Row = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

N = 200
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.7},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    "dynatemp": {"dynatemp_range": 0.7, "dynatemp_exponent": 1.5},
    "mirostat": {"mirostat": 1, "mirostat_tau": 4.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 4.0},
    "adaptive_p": {"adaptive_target": 0.2},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "another order": {"samplers": ["temperature", "min_p", "top_p", "top_k", "penalties"], "repetition_penalty": 1.2},
}
STRONG: dict[str, dict[str, Any]] = {  # what each sampler must visibly do, where it is listed
    "penalties": {"repetition_penalty": 3.0, "presence_penalty": 2.0},
    "dry": {"dry_multiplier": 100.0, "dry_allowed_length": 0},
    "top_n_sigma": {"top_n_sigma": 0.5},
    "top_k": {"top_k": 2},
    "typical_p": {"typical_p": 0.1},
    "top_p": {"top_p": 0.1},
    "min_p": {"min_p": 0.9},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "temperature": {"temperature": 30.0},
}


class SmallVocab(FakeVocab):
    n_tokens = N
    eog = frozenset()


class NoContext:
    """For tests that sample their own rows (`Sampler.sample_logits`)."""

    backend_sampling: BackendSampling | None = None

    def logits(self, n_outputs: int) -> Row:
        raise AssertionError("no context is needed here")


def logits(spread: float = 2.0, seed: int = 7) -> Row:
    return np.random.default_rng(seed).normal(0, spread, N).astype(np.float32)


def sequence_of(params: SamplingParams, seed: int = 0, vocab: Vocabulary | None = None, prompt: str = "a") -> Seq:
    vocab = vocab or SmallVocab()
    tokens = vocab.tokenize(prompt)
    request = GenerationRequest(id=str(seed), prompt=tokens.tolist(), params=params)
    sequence = Seq(request, tokens, max_new=2000, seed=seed, now=0.0)
    sequence.sampling = make_sampling_plan(params, vocab, 4096)
    return sequence


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    sampler = Sampler(SmallVocab(), NoContext())
    yield sampler
    sampler.close()


def close(sequences: list[Seq]) -> None:
    for sequence in sequences:
        if sequence.sampler:
            sequence.sampler.close()


def counts_of(sampler: Sampler, row: Row, n: int = 1000, **fields: Any) -> Counts:
    """How often each token is the first one of n requests with different seeds."""
    params = SamplingParams(**{**OFF, **fields})
    seeds = np.random.default_rng(1).integers(2**63, size=n).tolist()
    sequences = [sequence_of(params, seed) for seed in seeds]
    assert sequences[0].sampling.sampling_type is SamplingType.CHAIN
    choices = sampler.sample_logits(sequences, np.tile(row, (n, 1)))
    close(sequences)
    assert all(choice.error is None for choice in choices)
    return np.bincount([choice.token for choice in choices], minlength=N)


def text_of(sampler: Sampler, row: Row, n: int, **fields: Any) -> list[int]:
    """The tokens of one request to a model that returns the same logits each time."""
    sequence = sequence_of(SamplingParams(**{**OFF, **fields}))
    for _ in range(n):
        choice = sampler.sample_logits([sequence], row[None].copy())[0]
        assert choice.error is None
        sequence.append(choice.token)
    close([sequence])
    tokens: list[int] = sequence.tokens[sequence.n_prompt : sequence.n_tokens].tolist()
    return tokens


def over(kept: npt.NDArray[np.bool_], row: Row, temperature: float = 1.0) -> Doubles:
    """The distribution over what is kept."""
    return softmax(np.where(kept, row.astype(np.float64), -np.inf) / temperature)


# --- the filters, each by its definition ----------------------------------------------------------------------------


def is_typical(row: Row, p: float) -> npt.NDArray[np.bool_]:
    """The tokens with a surprise nearest to the entropy, until their probabilities exceed p."""
    probabilities = softmax(row.astype(np.float64))
    possible = probabilities > 0
    surprise = -np.log(probabilities, where=possible, out=np.full(len(row), np.inf))
    entropy = (probabilities[possible] * surprise[possible]).sum()
    order = np.argsort(abs(surprise - entropy))
    n_kept = np.searchsorted(np.cumsum(probabilities[order]), p, side="right") + 1
    return np.isin(np.arange(len(row)), order[:n_kept])


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_typical_p_draws_among_the_most_typical_tokens(sampler: Sampler, p: float) -> None:
    row = logits()
    kept = is_typical(row, p)
    assert 1 < kept.sum() < N
    assert_drawn_from(counts_of(sampler, row, typical_p=p), over(kept, row))


def test_a_practically_impossible_token_does_not_change_which_tokens_are_typical(sampler: Sampler) -> None:
    row = logits()
    row[5] = -3.0
    kept = is_typical(row, 0.5)
    assert not kept[5]
    assert_drawn_from(counts_of(sampler, row, typical_p=0.5, logit_bias={5: -100.0}), over(kept, row))


@pytest.mark.parametrize("n", [0.5, 1.0, 2.0])
def test_top_n_sigma_draws_among_the_tokens_within_n_deviations_of_the_most_likely(sampler: Sampler, n: float) -> None:
    row = logits()
    kept = row >= row.max() - n * row.std()
    assert kept.sum() < N
    assert_drawn_from(counts_of(sampler, row, top_n_sigma=n, temperature=2.0), over(kept, row, 2.0))


def test_top_n_sigma_ignores_impossible_tokens(sampler: Sampler) -> None:
    row = logits()
    row[row > 4] = -np.inf
    possible = np.isfinite(row)
    kept = row >= row.max() - 1.0 * row[possible].std()
    assert 1 < kept.sum() < possible.sum()
    assert_drawn_from(counts_of(sampler, row, top_n_sigma=1.0), over(kept, row))


def is_left_by_xtc(row: Row, threshold: float) -> npt.NDArray[np.bool_]:
    """All but the tokens above the threshold, of which the least likely stays."""
    probabilities = softmax(row.astype(np.float64))
    top = probabilities >= threshold
    kept: npt.NDArray[np.bool_] = ~top | (probabilities == probabilities[top].min())
    return kept


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_xtc_excludes_the_most_likely_tokens_with_the_given_probability(sampler: Sampler, probability: float) -> None:
    row = logits()
    kept = is_left_by_xtc(row, 0.03)
    assert 1 < (~kept).sum() < 20
    expected = probability * over(kept, row) + (1 - probability) * softmax(row.astype(np.float64))
    assert_drawn_from(counts_of(sampler, row, xtc_probability=probability, xtc_threshold=0.03), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_a_dynamic_temperature_follows_the_entropy(sampler: Sampler, spread: float, exponent: float) -> None:
    row = logits(spread)
    probabilities = softmax(row.astype(np.float64))
    entropy = -(probabilities * np.log(probabilities)).sum() / np.log(N)
    temperature = 0.4 + (1.6 - 0.4) * entropy**exponent
    expected = softmax(row / temperature)
    counts = counts_of(sampler, row, temperature=1.0, dynatemp_range=0.6, dynatemp_exponent=exponent)
    assert_drawn_from(counts, expected)


def test_a_range_around_a_temperature_of_zero_still_draws(sampler: Sampler) -> None:
    row = logits(0.1)
    assert np.count_nonzero(counts_of(sampler, row, 200, temperature=0.0, dynatemp_range=2.0)) > 50


# --- the draws that replace the last one ----------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.5, 3.0, 5.0])
def test_mirostat_2_cuts_off_surprising_tokens_so_that_the_surprise_stays_at_tau(sampler: Sampler, tau: float) -> None:
    row = logits()
    surprise = -np.log2(softmax(row.astype(np.float64)))
    limit, observed = 2 * tau, []
    for token in text_of(sampler, row, 600, mirostat=2, mirostat_tau=tau, mirostat_eta=0.1):
        kept = surprise <= max(limit, surprise.min()) + 1e-4
        assert kept[token]
        observed.append(-np.log2(over(kept, row)[token]))
        limit -= 0.1 * (observed[-1] - tau)
    assert np.mean(observed[100:]) == pytest.approx(tau, abs=0.15)


@pytest.mark.parametrize("tau", [1.5, 3.0, 5.0])
def test_the_first_mirostat_holds_the_surprise_at_tau(sampler: Sampler, tau: float) -> None:
    row = logits()
    order = np.argsort(-row)
    probabilities = softmax(row[order].astype(np.float64))
    steps = np.log(np.arange(2, 101) / np.arange(1, 100))
    slope = (steps * np.log(probabilities[:99] / probabilities[1:100])).sum() / (steps**2).sum()
    limit, observed = 2 * tau, []
    for token in text_of(sampler, row, 600, mirostat=1, mirostat_tau=tau, mirostat_eta=0.1):
        excess = slope - 1
        k = max(int((excess * 2**limit / (1 - N**-excess)) ** (1 / slope) + 1e-3), 1)
        rank = order.tolist().index(token)
        assert rank < k
        observed.append(-np.log2(probabilities[rank] / probabilities[:k].sum()))
        limit -= 0.1 * (observed[-1] - tau)
    assert np.mean(observed[100:]) == pytest.approx(tau, abs=0.15)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_replaces_the_filters(sampler: Sampler, version: int) -> None:
    plain, filtered = (
        text_of(sampler, logits(), 60, mirostat=version, **fields) for fields in ({}, {"top_k": 1, "typical_p": 0.1})
    )
    assert plain == filtered
    assert len(set(plain)) > 5


@pytest.mark.parametrize("target", [0.05, 0.3, 0.9])
def test_the_first_draw_of_adaptive_p_prefers_tokens_of_the_target_probability(sampler: Sampler, target: float) -> None:
    row = logits(3.0)
    distance = abs(softmax(row.astype(np.float64)) - target) / 0.3
    expected = softmax(5 - 10 * distance**2 / (1 + distance))
    assert_drawn_from(counts_of(sampler, row, adaptive_target=target), expected)


def test_adaptive_p_goes_up_and_down_with_its_target(sampler: Sampler) -> None:
    row = np.full(N, -np.inf, np.float32)
    row[:6] = np.log([0.5, 0.25, 0.12, 0.07, 0.04, 0.02])
    means = []
    for target in (0.05, 0.2, 0.4):
        tokens = text_of(sampler, row, 300, adaptive_target=target)
        means.append(np.exp(row[tokens]).mean())
    assert means == sorted(means)
    assert means[1] == pytest.approx(0.2, abs=0.05)


def test_adaptive_p_draws_among_what_the_filters_leave(sampler: Sampler) -> None:
    row = logits(0.5)
    counts = counts_of(sampler, row, 500, adaptive_target=0.2, top_k=5)
    assert set(np.flatnonzero(counts)) == set(np.argsort(row)[-5:])


# --- DRY ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def next_token(llama_model: Model) -> Iterator[Callable[..., bytes]]:
    """The next token of a text if the model prefers `wanted` and its second choice is "#"."""
    vocab = llama_model.vocab
    sampler = Sampler(vocab, NoContext())

    def next_token(text: str, wanted: str, **fields: Any) -> bytes:
        params = SamplingParams(**{"temperature": 0.0, "dry_multiplier": 10.0, **fields})
        sequence = sequence_of(params, vocab=vocab, prompt=text)
        row = np.zeros((1, vocab.n_tokens), np.float32)
        (first,) = vocab.tokenize(wanted, add_special=False).tolist()
        (second,) = vocab.tokenize("#", add_special=False).tolist()
        row[0, first], row[0, second] = 8.0, 7.0
        token = sampler.sample_logits([sequence], row)[0].token
        close([sequence])
        return vocab.piece(token)

    yield next_token
    sampler.close()


def test_dry_breaks_a_repetition(next_token: Callable[..., bytes]) -> None:
    assert next_token("xyzq1xyz", "q") == b"#"
    assert next_token("xyzq1xyz", "q", dry_multiplier=0.0) == b"q"


def test_dry_breaks_a_repetition_in_drawn_texts_too(next_token: Callable[..., bytes]) -> None:
    assert next_token("xyzq1xyz", "q", temperature=0.1, top_k=2, seed=1) == b"#"
    assert next_token("xyzq1xyz", "q", temperature=0.1, top_k=2, seed=1, dry_multiplier=0.0) == b"q"


def test_dry_does_not_penalise_text_without_repetition(next_token: Callable[..., bytes]) -> None:
    assert next_token("xyzq1xyz", "k") == b"k"
    assert next_token("xyzq1xkz", "q") == b"q"


def test_dry_lets_repetitions_of_the_allowed_length_pass(next_token: Callable[..., bytes]) -> None:
    assert next_token("xyzq1xyz", "q", dry_allowed_length=3) == b"#"
    assert next_token("xyzq1xyz", "q", dry_allowed_length=4) == b"q"


def test_the_penalty_of_dry_grows_with_the_length_of_the_repetition(next_token: Callable[..., bytes]) -> None:
    """0.3 * 2 ** (length - 2) against a lead of 1: too little for three tokens, enough for five."""
    growing: dict[str, Any] = {"dry_multiplier": 0.3, "dry_base": 2.0}
    assert next_token("xyzq1xyz", "q", **growing) == b"q"
    assert next_token("vwxyzq1vwxyz", "q", **growing) == b"#"


def test_no_repetition_reaches_over_a_breaker(next_token: Callable[..., bytes]) -> None:
    assert next_token("xy:zq1xy:z", "q") == b"q"
    assert next_token("xy:zq1xy:z", "q", dry_sequence_breakers=["\n"]) == b"#"
    assert next_token("xyzq1xyz", "q", dry_sequence_breakers=["y"]) == b"q"
    assert next_token("xyzq1xyz", "q", dry_sequence_breakers="yz") == b"q"
    assert next_token("xyzq1xyz", "q", dry_sequence_breakers=["kz", "zy"]) == b"#"


def test_dry_searches_the_given_number_of_tokens(next_token: Callable[..., bytes]) -> None:
    text = "xyzq" + "0123456789" * 12 + "xyz"
    assert next_token(text, "q", dry_penalty_last_n=64) == b"q"
    assert next_token(text, "q", dry_penalty_last_n=0) == b"q"
    assert next_token(text, "q", dry_penalty_last_n=500) == b"#"
    assert next_token(text, "q", dry_penalty_last_n=-1) == b"#"


# --- the order ------------------------------------------------------------------------------------------------------


def test_the_samplers_are_applied_in_the_order_they_are_given(sampler: Sampler) -> None:
    row = logits()
    fields: dict[str, Any] = {"temperature": 2.0, "top_p": 0.7}
    temperature_first = exact(row / np.float32(2), Filters(0, 0.7, 0.0, 1.0))
    top_p_first = exact(row, Filters(0, 0.7, 0.0, 2.0))
    assert np.count_nonzero(temperature_first) > 2 * np.count_nonzero(top_p_first)
    assert_drawn_from(counts_of(sampler, row, samplers=["temperature", "top_p"], **fields), temperature_first)
    fields |= {"top_n_sigma": 100.0}  # does nothing, but needs a chain
    assert_drawn_from(counts_of(sampler, row, **fields), top_p_first)


def test_penalties_may_come_after_the_filters(sampler: Sampler) -> None:
    row = logits()
    (seen,) = SmallVocab().tokenize("a").tolist()
    row[seen] = row.max() + 1
    fields: dict[str, Any] = {"top_k": 1, "presence_penalty": 2.0}
    assert counts_of(sampler, row, 50, samplers=["top_k", "penalties"], **fields)[seen] == 50
    assert counts_of(sampler, row, 50, top_n_sigma=100.0, **fields)[seen] == 0


def test_a_chain_penalises_the_tokens_that_it_has_sampled(sampler: Sampler) -> None:
    row = logits()
    fields: dict[str, Any] = {"top_n_sigma": 100.0, "top_k": 1, "penalty_last_n": 3, "repetition_penalty": 1e2}
    best = np.argsort(-row)[:4].tolist()
    assert text_of(sampler, row, 12, **fields) == best * 3


# --- one of many ----------------------------------------------------------------------------------------------------


def test_a_row_without_a_possible_token_is_an_error_of_its_own_request(sampler: Sampler) -> None:
    kinds = [kind for name, kind in KINDS.items() if name != "dry"]
    sequences = [sequence_of(SamplingParams(**kind)) for kind in kinds * 2]
    rows = np.tile(logits(), (len(sequences), 1))
    rows[::2] = -np.inf
    choices = sampler.sample_logits(sequences, rows)
    close(sequences)
    assert {choice.error for choice in choices[::2]} == {
        "no token can be sampled: the largest logit of this row is -inf"
    }
    assert {choice.error for choice in choices[1::2]} == {None}
    assert all(choice.token >= 0 for choice in choices[1::2])


# --- the edges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for name, kind in KINDS.items() if name != "dry"])
def test_a_row_with_one_possible_token_gives_it(sampler: Sampler, kind: dict[str, Any]) -> None:
    row = np.full(N, -np.inf, np.float32)
    row[11] = -5.0
    assert text_of(sampler, row, 20, **kind) == [11] * 20


# --- in the engine --------------------------------------------------------------------------------------------------


engine = shared_engine(n_ctx=1024, n_parallel=16, n_threads=1, flash_attn="off")


def params_of(kind: dict[str, Any], seed: int, **others: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 24, "ignore_eos": True, "top_k": 0, **kind, **others})


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    assert all(completion.error is None for completion in completions)
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_seed_gives_its_text_again_and_others_give_other_texts(
    engine: BatchInferenceEngine, kind: dict[str, Any]
) -> None:
    params = [params_of(kind, seed) for seed in (10, 11, 12, 13, 10, 10 + 2**32)]
    *texts, again, far = tokens_of(engine.generate(["Once upon"] * 6, params))
    assert texts[0] == again
    assert all(len(text) == 24 for text in texts)
    assert len(set(map(tuple, [*texts, far]))) == 5


@pytest.mark.parametrize("last_n", [8, 64, -1])
def test_penalties_of_a_chain_give_the_text_that_those_of_numpy_give(engine: BatchInferenceEngine, last_n: int) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.3,
        "penalty_last_n": last_n,
    }
    idle: dict[str, Any] = {"dry_multiplier": 1.0, "dry_allowed_length": 10_000}  # does nothing, but needs a chain
    params = [params_of(kind, 1, max_tokens=100) for kind in (fields, {**fields, **idle}, {"temperature": 0.0})]
    by_numpy, by_chain, plain = tokens_of(engine.generate(["la la la la la la"] * 3, params))
    assert by_numpy == by_chain != plain


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_sampler_changes_the_text(engine: BatchInferenceEngine, kind: dict[str, Any]) -> None:
    plain, special = tokens_of(engine.generate(["Once upon"] * 2, [params_of({}, 10), params_of(kind, 10)]))
    assert plain != special


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_suppressed_tokens_never_come_through_a_chain(engine: BatchInferenceEngine, kind: dict[str, Any]) -> None:
    never = tuple(range(engine.info.n_vocab // 2)) + tuple(range(300, 500, 3))
    params = [params_of(kind, seed, temperature=20.0, suppress_tokens=never) for seed in range(8)]
    texts = tokens_of(engine.generate(["Once upon"] * 8, params))
    assert not {token for text in texts for token in text} & set(never)


def test_sixteen_chains_sampled_together_give_the_texts_they_give_alone(engine: BatchInferenceEngine) -> None:
    prompts = [f"{'long ' * (i % 5)}prompt {i}" for i in range(16)]
    params = [params_of(kind, seed) for seed, kind in enumerate((list(KINDS.values()) * 2)[:16])]
    together = tokens_of(engine.generate(prompts, params))
    assert together == [tokens_of(engine.generate([prompts[i]], params[i]))[0] for i in range(16)]


@pytest.mark.parametrize(("swap_space", "way"), [(0, "recomputes"), (16, "swaps")])
def test_preempted_sequences_continue_unchanged(
    engine: BatchInferenceEngine, tiny_llama: Path, swap_space: int, way: str
) -> None:
    params = [params_of(kind, seed, max_tokens=60) for seed, kind in enumerate(KINDS.values())]
    prompts = ["Once upon"] * len(params)
    ample = tokens_of(engine.generate(prompts, params))
    with BatchInferenceEngine(
        tiny_llama, n_ctx=256, n_batch=64, n_parallel=16, n_threads=1, flash_attn="off", swap_space=swap_space
    ) as tight:
        assert tokens_of(tight.generate(prompts, params)) == ample
        assert getattr(tight.stats(), way) > 0


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_that_is_interrupted_does_not_change_the_text(
    engine: BatchInferenceEngine, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = msgspec.structs.replace(params_of(kind, 10), speculate=False)  # so that ten steps give ten tokens
    expected = tokens_of(engine.generate(["Once upon"], params))[0]
    engine.add_request("Once upon", params)
    events = [event for _ in range(10) for event in engine.step()]

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runtime.context, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_work:
        events += engine.step()
    assert [token for event in events for token in event.tokens] == expected


def test_every_sampler_is_tried_here() -> None:
    assert tuple(STRONG) == SAMPLERS


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_omitted_sampler_has_no_effect_and_a_listed_one_has(engine: BatchInferenceEngine, name: str) -> None:
    others = [other for other in SAMPLERS if other != name]
    listed, left_out, neutral = tokens_of(
        engine.generate(
            ["la la la la la la"] * 3,
            [
                params_of({**OFF, **STRONG[name]}, 7),
                params_of({**OFF, **STRONG[name], "samplers": others}, 7),
                params_of(OFF, 7),
            ],
        )
    )
    assert left_out == neutral
    assert listed != neutral


def test_without_any_sampler_the_model_itself_is_drawn_from(engine: BatchInferenceEngine) -> None:
    everything: dict[str, Any] = {key: value for fields in STRONG.values() for key, value in fields.items()}
    none, neutral = tokens_of(
        engine.generate(["la la la la la la"] * 2, [params_of({**everything, "samplers": []}, 7), params_of(OFF, 7)])
    )
    assert none == neutral
