"""SamplerChain: llama.cpp's samplers over one row of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cppbatch.errors import LlamaError, OutOfRange
from cppbatch.llama import SamplerChain

Row = npt.NDArray[np.float32]

N_VOCAB = 64


@pytest.fixture
def row() -> Row:
    return np.random.default_rng(7).normal(0, 2, N_VOCAB).astype(np.float32)


def draws(seed: int, row: Row, n: int = 30) -> list[int]:
    with SamplerChain(N_VOCAB).top_k(40).top_p(0.95).min_p(0.01).temperature(1.5).dist() as chain:
        return [chain.sample(row, seed + i) for i in range(n)]


def test_greedy_takes_the_most_likely_token(row: Row) -> None:
    with SamplerChain(N_VOCAB).greedy() as chain:
        assert chain.sample(row) == row.argmax()


def test_the_same_seed_draws_the_same_tokens(row: Row) -> None:
    assert draws(1, row) == draws(1, row)
    assert draws(1, row) == draws(1 + (2**32 - 1), row)
    assert draws(1, row) != draws(100, row)
    assert len(set(draws(1, row))) > 1


def test_top_k_of_one_is_greedy(row: Row) -> None:
    with SamplerChain(N_VOCAB).top_k(1).temperature(5.0).dist() as chain:
        assert [chain.sample(row, seed) for seed in range(20)] == [row.argmax()] * 20


def test_top_k_draws_among_the_k_most_likely_tokens(row: Row) -> None:
    with SamplerChain(N_VOCAB).top_k(3).temperature(5.0).dist() as chain:
        assert {chain.sample(row, seed) for seed in range(100)} == set(np.argsort(row)[-3:])


def test_top_p_and_min_p_drop_unlikely_tokens() -> None:
    row = np.full(N_VOCAB, -3.0, np.float32)
    row[[4, 9]] = 5.0
    for chain in (SamplerChain(N_VOCAB).top_p(0.5).dist(), SamplerChain(N_VOCAB).min_p(0.5).dist()):
        with chain:
            assert {chain.sample(row, seed) for seed in range(50)} <= {4, 9}


@pytest.mark.parametrize(("repeat", "frequency", "presence"), [(2.0, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 0.0, 2.0)])
def test_each_penalty_changes_the_next_choice(repeat: float, frequency: float, presence: float) -> None:
    row = np.zeros(N_VOCAB, np.float32)
    row[4], row[9] = 3.0, 2.0
    with SamplerChain(N_VOCAB).penalties(16, repeat, frequency, presence).greedy() as chain:
        assert chain.sample(row) == 4
        chain.accept(4)
        assert chain.sample(row) == 9


def test_tokens_of_the_prompt_are_penalised_once_accepted() -> None:
    row = np.zeros(N_VOCAB, np.float32)
    row[4], row[9] = 3.0, 2.0
    with SamplerChain(N_VOCAB).penalties(16, 2.0, 0.0, 0.0).greedy() as chain:
        chain.accept(4)
        assert chain.sample(row) == 9


def test_tokens_older_than_the_window_are_not_penalised() -> None:
    row = np.zeros(N_VOCAB, np.float32)
    row[4] = 3.0
    with SamplerChain(N_VOCAB).penalties(2, 100.0, 0.0, 0.0).greedy() as chain:
        for token in (4, 20, 21):
            chain.accept(token)
        assert chain.sample(row) == 4


def test_sampling_leaves_the_row_as_it_was(row: Row) -> None:
    before = row.copy()
    draws(1, row)
    assert np.array_equal(row, before)


@pytest.mark.parametrize("value", [-np.inf, np.nan])
@pytest.mark.parametrize("kind", ["greedy", "dist", "filtered"])
def test_a_row_without_any_possible_token_raises(kind: str, value: Any) -> None:
    chain = SamplerChain(N_VOCAB)
    if kind == "greedy":
        chain.greedy()
    elif kind == "dist":
        chain.dist()
    else:
        chain.top_k(40).min_p(0.05).dist()
    with chain, pytest.raises(LlamaError, match="no token can be sampled"):
        chain.sample(np.full(N_VOCAB, value, np.float32))


def test_a_row_with_one_possible_token_gives_it() -> None:
    row = np.full(N_VOCAB, -np.inf, np.float32)
    row[11] = -5.0
    with SamplerChain(N_VOCAB).top_k(40).top_p(0.95).min_p(0.05).temperature(0.8).dist() as chain:
        assert [chain.sample(row, seed) for seed in range(20)] == [11] * 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_parameters_that_are_not_finite_are_refused(bad: Any) -> None:
    with SamplerChain(N_VOCAB) as chain:
        for add in (chain.top_p, chain.min_p, chain.temperature):
            with pytest.raises(OutOfRange):
                add(bad)
        for repeat, frequency, presence in ((bad, 0.0, 0.0), (1.0, bad, 0.0), (1.0, 0.0, bad)):
            with pytest.raises(OutOfRange):
                chain.penalties(16, repeat, frequency, presence)


def test_impossible_penalties_are_refused() -> None:
    with SamplerChain(N_VOCAB) as chain:
        for last_n, repeat in ((-1, 1.1), (16, 0.0), (16, -1.0)):
            with pytest.raises(OutOfRange):
                chain.penalties(last_n, repeat, 0.0, 0.0)


@pytest.mark.parametrize("size", [1, N_VOCAB - 1, N_VOCAB + 1])
def test_a_row_of_another_size_is_refused(size: Any) -> None:
    with SamplerChain(N_VOCAB).greedy() as chain, pytest.raises(OutOfRange):
        chain.sample(np.zeros(size, np.float32))


def test_a_closed_chain_refuses_use(row: Row) -> None:
    with SamplerChain(N_VOCAB).greedy() as chain:
        pass
    chain.close()
    for use in (lambda: chain.sample(row), lambda: chain.accept(1), chain.greedy):
        with pytest.raises(LlamaError, match="closed"):
            use()


def test_a_chain_that_never_chooses_raises(row: Row) -> None:
    with SamplerChain(N_VOCAB).top_k(4) as chain, pytest.raises(LlamaError):
        chain.sample(row)
