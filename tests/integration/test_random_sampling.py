"""numpy sampling and llama.cpp's samplers: the same distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.engine.sampling_plan import Filters
from cppbatch.llama import SamplerChain
from tests.support.distributions import DEFAULTS, assert_drawn_from, drawn, exact, keys, logits, softmax, tied
from tests.support.randomised import cases

Row = npt.NDArray[np.float32]

Doubles = npt.NDArray[np.float64]

UInt64 = npt.NDArray[np.uint64]

Counts = npt.NDArray[np.int64]

SMALL = {  # compared with llama.cpp too
    "temperature": Filters(0, 1.0, 0.0, 0.8),
    "a high temperature": Filters(0, 1.0, 0.0, 3.0),
    "top_k": Filters(20, 1.0, 0.0, 1.2),
    "top_p": Filters(0, 0.9, 0.0, 1.0),
    "top_k and top_p": Filters(30, 0.9, 0.0, 1.5),
    "min_p": Filters(0, 1.0, 0.05, 1.0),
    "llama.cpp's defaults": DEFAULTS,
}


def drawn_by_llama(row: Row, filters: Filters, n: int, seed: int = 1) -> Counts:
    with SamplerChain(len(row)) as chain:
        chain.top_k(filters.top_k).top_p(filters.top_p).min_p(filters.min_p).temperature(filters.temperature).dist()
        seeds = np.random.default_rng(seed).integers(2**32 - 1, size=n).tolist()
        return np.bincount([chain.sample(row, seed) for seed in seeds], minlength=len(row))


@cases(ring=2_000, nightly=5_000, soak=20_000)
@pytest.mark.parametrize("filters", SMALL.values(), ids=SMALL)
def test_numpy_and_llama_cpp_draw_from_the_same_distribution(filters: Filters, n_cases: int) -> None:
    row = logits(250)
    assert_drawn_from(drawn(row, filters, keys(n_cases)), exact(row, filters))
    assert_drawn_from(drawn_by_llama(row, filters, n_cases), exact(row, filters))


@cases(ring=2_000, nightly=5_000, soak=20_000)
def test_a_top_k_of_many_hundreds_is_that_of_llama_cpp(n_cases: int) -> None:
    row, filters = logits(700, 1.0), Filters(600, 0.95, 0.0, 1.3)
    assert_drawn_from(drawn(row, filters, keys(n_cases)), exact(row, filters))
    assert_drawn_from(drawn_by_llama(row, filters, n_cases), exact(row, filters))


@pytest.mark.parametrize("filters", SMALL.values(), ids=SMALL)
def test_a_chain_of_llama_cpp_leaves_that_distribution(filters: Filters) -> None:
    row = logits(250)
    with SamplerChain(len(row)) as chain:
        chain.top_k(filters.top_k).top_p(filters.top_p).min_p(filters.min_p).temperature(filters.temperature).dist()
        token, left = chain.draw(row, 3)
    probabilities = np.zeros(len(row))
    probabilities[left["id"]] = softmax(left["logit"].astype(np.float64))
    assert probabilities == pytest.approx(exact(row, filters), abs=1e-6)
    assert token in left["id"]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 12))])
def test_every_token_that_llama_cpp_can_draw_comes_and_no_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = logits(120, float(rng.uniform(0.5, 4)), seed)
    filters = Filters(
        top_k=int(rng.integers(0, 100) * rng.integers(0, 2)),
        top_p=float(rng.choice([1.0, rng.uniform(0.3, 1)])),
        min_p=float(rng.choice([0.0, rng.uniform(0.001, 0.3)])),
        temperature=100.0,  # comes last, and makes all that is left about equally likely
    )
    theirs = np.flatnonzero(drawn_by_llama(row, filters, 4000))
    assert np.flatnonzero(drawn(row, filters, keys(4000))).tolist() == theirs.tolist()


@pytest.mark.parametrize(
    "filters", [Filters(2, 1.0, 0.0, 1.0), Filters(0, 0.3, 0.0, 1.0), Filters(40, 0.3, 0.0, 1.0), Filters(0, 0.6, 0, 1)]
)
def test_as_many_of_tied_tokens_are_kept_as_llama_cpp_keeps(filters: Filters) -> None:
    row = tied(300)
    ours, theirs = drawn(row, filters, keys(400)) > 0, drawn_by_llama(row, filters, 400) > 0
    assert 0 < ours.sum() == theirs.sum() < 4
    assert (row[ours] == row.max()).all()


def test_a_batch_of_greedy_rows_is_sampled_identically_on_the_fast_and_the_slow_path(tiny_llama: Path) -> None:
    """The fast path suffices for rows with an allowed largest logit; a ban, a penalty or a NaN needs the slow path."""
    with BatchInferenceEngine(tiny_llama, n_ctx=256, n_parallel=4, n_threads=1) as engine:
        plain = engine.generate(["Hello"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].tokens
        banned = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, suppress_tokens=(plain[0],))
        slow = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        quick, other, long = engine.generate(["Hello"] * 3, [slow, banned, slow])
        assert quick.tokens == long.tokens == plain
        assert plain[0] not in other.tokens
        assert engine.generate(["Hello"] * 2, [banned, banned])[1].tokens == other.tokens
