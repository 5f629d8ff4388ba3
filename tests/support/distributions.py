"""Rows of logits, their exact distributions, and whether drawn tokens follow them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling.random_sampling import random_sample
from cppbatch.engine.sampling_plan import Filters

Row = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
UInt64 = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
N_DRAWS = 10_000
DEFAULTS = Filters(top_k=40, top_p=0.95, min_p=0.05, temperature=0.8)


def logits(n: int, spread: float = 2.0, seed: int = 7) -> Row:
    return np.random.default_rng(seed).normal(0, spread, n).astype(np.float32)


def exact(row: Row, filters: Filters) -> Doubles:
    """The distribution by its definition: each filter in llama.cpp's order on all that are left, in float64."""
    order = np.argsort(-row, kind="stable")
    values = row[order].astype(np.float64)
    values = values[: filters.top_k or None]
    if filters.top_p < 1:
        values = values[: np.searchsorted(np.cumsum(softmax(values)), filters.top_p) + 1]
    if filters.min_p:
        values = values[values >= values[0] + np.log(filters.min_p)]
    probabilities = np.zeros(len(row))
    probabilities[order[: len(values)]] = softmax(values / filters.temperature)
    return probabilities


def softmax(values: Doubles) -> Doubles:
    weights = np.exp(values - values.max())
    probabilities: Doubles = weights / weights.sum()
    return probabilities


def drawn(row: Row, filters: Filters, numbers: UInt64, at_once: int = 500) -> Counts:
    """How often each token is drawn, in batches of equal rows."""
    counts = np.zeros(len(row), np.int64)
    for part in np.array_split(numbers, max(1, len(numbers) // at_once)):
        tokens = random_sample(np.broadcast_to(row, (len(part), len(row))), [filters] * len(part), part)
        counts += np.bincount(tokens, minlength=len(row))
    return counts


def keys(n: int = N_DRAWS, seed: int = 1) -> UInt64:
    return np.random.default_rng(seed).integers(2**64, size=n, dtype=np.uint64)


def are_far(counts: Counts, probabilities: Doubles) -> bool:
    """Pearson's chi-square: whether numbers so far from the expected ones come once in 10,000 times or less.

    The rarest tokens are counted together, until ten of them are expected.
    """
    expected = probabilities * counts.sum()
    bins = [[0.0, 0.0]]
    for i in np.argsort(expected):
        if bins[-1][1] >= 10:
            bins.append([0.0, 0.0])
        bins[-1][0] += counts[i]
        bins[-1][1] += expected[i]
    observed, wanted = np.array(bins).T
    return bool(((observed - wanted) ** 2 / wanted).sum() > unlikely_chi_square(len(bins) - 1))


def unlikely_chi_square(freedom: int) -> float:
    """What chi-square exceeds once in 10,000 times (Wilson and Hilferty, 1931)."""
    if freedom == 0:
        return 1e-9
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 3.719 * np.sqrt(spread)) ** 3)


def assert_drawn_from(counts: Counts, probabilities: Doubles) -> None:
    assert not counts[probabilities == 0].any(), "a token came that the filters drop"
    assert not are_far(counts, probabilities)


def tied(n: int) -> Row:
    """Four tokens share the largest logit."""
    row = logits(n)
    row[[5, 50, 100, n - 1]] = row.max() + 3
    return row
