"""Penalties computed by numpy are those of llama.cpp."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cppbatch.llama import SamplerChain
from tests.support.fakes import EOG, LOGITS, N_VOCAB, fake_engine, greedy, mood, reference
from tests.unit.test_penalties import HISTORY, SETTINGS, fields_of, logits, penalised

Row = npt.NDArray[np.float32]

MANY = settings(deadline=None, derandomize=True, database=None, max_examples=200)


def order_by_llama(row: Row, known: list[int], numbers: tuple[float, float, float], last_n: int) -> list[int]:
    """All tokens in the order of the logits that llama.cpp's penalties leave: the first is taken, banned, and again."""
    row, order = row.copy(), []
    with SamplerChain(N_VOCAB).penalties(last_n, *numbers).greedy() as chain:
        for token in known:
            chain.accept(token)
        for _ in range(N_VOCAB):
            order.append(chain.sample(row))
            row[order[-1]] = -np.inf
    return order


def logit_by_llama(row: Row, token: int, known: list[int], numbers: tuple[float, float, float], last_n: int) -> float:
    """The logit that llama.cpp's penalties leave of this token: where it draws level with a token not seen before."""
    rival = next(t for t in range(N_VOCAB) if t not in known and t != token)
    both = np.full(N_VOCAB, -np.inf, np.float32)
    both[token] = row[token]
    low, high = -600.0, 600.0
    with SamplerChain(N_VOCAB).penalties(last_n, *numbers).greedy() as chain:
        for seen in known:
            chain.accept(seen)
        while high - low > 1e-4:
            both[rival] = (low + high) / 2
            low, high = (both[rival], high) if chain.sample(both) == token else (low, both[rival])
    return float(low + high) / 2


@pytest.mark.parametrize("last_n", [1, 4, len(HISTORY), 64])
@pytest.mark.parametrize("numbers", SETTINGS.values(), ids=SETTINGS)
def test_penalties_leave_the_tokens_in_the_order_that_llama_cpp_leaves_them_in(
    numbers: tuple[float, float, float], last_n: int
) -> None:
    row = logits()
    ours = penalised(row, HISTORY, **fields_of(numbers, last_n))
    assert np.argsort(-ours).tolist() == order_by_llama(row, HISTORY, numbers, last_n)
    assert not np.array_equal(ours, row)


@pytest.mark.parametrize("last_n", [5, 64])
@pytest.mark.parametrize("numbers", SETTINGS.values(), ids=SETTINGS)
def test_penalised_logits_are_those_of_llama_cpp(numbers: tuple[float, float, float], last_n: int) -> None:
    row = logits()
    row[3], row[9], row[7], row[52] = 2.5, -2.5, 0.0, -0.25
    ours = penalised(row, HISTORY, **fields_of(numbers, last_n))
    for token in (3, 7, 9, 52, 60):
        assert ours[token] == pytest.approx(logit_by_llama(row, token, HISTORY, numbers, last_n), abs=1e-3)


@MANY
@given(
    known=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    numbers=st.tuples(st.floats(0.1, 10), st.floats(-2, 2), st.floats(-2, 2)),
    last_n=st.integers(1, 45),
    seed=st.integers(0, 1000),
)
def test_the_most_likely_token_is_that_of_llama_cpp_for_any_history(
    known: list[int], numbers: tuple[float, float, float], last_n: int, seed: int
) -> None:
    row = logits(seed)
    ours = penalised(row, known, **fields_of(numbers, last_n))
    theirs = order_by_llama(row, known, numbers, last_n)[0]
    assert ours[theirs] == pytest.approx(ours.max(), abs=1e-5)


def greedily(known: list[int], n: int, last_n: int, repetition: float) -> list[int]:
    """What the fake model answers greedily, each row penalised by llama.cpp; no end comes."""
    tokens: list[int] = []
    while len(tokens) < n:
        row = LOGITS[mood(bytes(known + tokens))].copy()
        row[list(EOG)] = -np.inf
        with SamplerChain(N_VOCAB).penalties(last_n, repetition, 0.4, 0.7).greedy() as chain:
            for token in known + tokens:
                chain.accept(token)
            tokens.append(chain.sample(row))
    return tokens


@pytest.mark.parametrize("last_n", [4, 7, 64])
def test_a_greedy_text_is_penalised_token_by_token_as_llama_cpp_does(last_n: int) -> None:
    prompt = [1, 2, 3, 4, 5, 2, 3]
    others = fields_of((3.0, 0.4, 0.7), last_n)
    with fake_engine() as engine:
        text = engine.generate([prompt], greedy(30, ignore_eos=True, **others))[0].tokens
    assert text == greedily(prompt, 30, last_n, 3.0)
    assert text != reference(prompt, greedy(30, ignore_eos=True))[0]
