"""Top-k, top-p, min-p, temperature and random sampling, for all rows of a step at once.

The distribution is that of llama.cpp's samplers in their default order: the filters apply to the logits before
temperature. tests/integration/test_random_sampling.py compares 20,000 samples of each. Only tokens above a floor, below
which none can pass the filters, are examined: about fifty of 49,152 logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling_plan import Filters

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

NO_TOKEN = -1
"""The result for a row from which nothing can be sampled (all -inf, or a NaN)."""

_LOWEST = np.finfo(np.float32).min  # excludes -inf: with a grammar, almost all of a row is -inf
_N_BLOCKS = 512  # blocks of a row whose maxima bound its k-th largest logit, for k up to this number
_DEPTHS = 2.0, 4.0, 8.0, 12.0  # below the largest logit: tokens kept by top-p are usually above one of these
_MAX_BATCHED_CANDIDATES = 256  # rows with more candidates are sampled separately: they would widen all rows' arrays


def random_sample(logits: Floats, filters: Sequence[Filters], keys: UInt64, ids: Ids | None = None) -> Ids:
    """Samples a column of each row of float32[n, width]: int64[n], `NO_TOKEN` for rows without a finite maximum.

    `keys`, uint64[n]: 64 random bits per row. `ids`, int64[n, width]: the token ids of the columns; None: rows cover
    the whole vocabulary. The result for a row depends only on its logits, filters and key, and hardly ever on the last
    bits of its logits, which vary with the batch.
    """
    settings = np.array(filters, np.float64)
    if ids is not None and ids.shape[1] <= _MAX_BATCHED_CANDIDATES:
        return _sample_all_columns(logits, settings, keys, ids)
    maxima, bounds = _row_maxima(logits, settings[:, 0].astype(np.int64))
    masses, candidates = np.zeros(len(logits)), {}
    for row in np.flatnonzero(np.isfinite(maxima)).tolist():
        floor, masses[row] = _floor(logits[row], float(maxima[row]), float(bounds[row]), filters[row])
        candidates[row] = np.flatnonzero(logits[row] >= max(np.float32(floor), _LOWEST))
    sampled = np.full(len(logits), NO_TOKEN, np.int64)
    batched = [row for row, columns in candidates.items() if len(columns) <= _MAX_BATCHED_CANDIDATES]
    wide = [row for row, columns in candidates.items() if len(columns) > _MAX_BATCHED_CANDIDATES]
    filtered = [row for row in wide if filters[row].top_k or filters[row].top_p < 1]
    for rows in ([batched] if batched else []) + [[row] for row in filtered]:
        columns, values = _pad_candidates(logits, [(row, candidates[row]) for row in rows])
        tokens = columns if ids is None else np.take_along_axis(ids[rows], columns, 1)
        scores = _filter(values, settings[rows], masses[rows]) + gumbel_noise(keys[rows], tokens)
        sampled[rows] = columns[np.arange(len(rows)), scores.argmax(axis=1)]
    for row in set(wide).difference(filtered):
        below = logits[row, candidates[row]] - maxima[row]
        sampled[row] = candidates[row][_sample_cumulative(below, filters[row].temperature, keys[row])]
    return sampled


def _sample_all_columns(logits: Floats, settings: Doubles, keys: UInt64, ids: Ids) -> Ids:
    """The same for rows with few columns and top-k, without a floor."""
    is_possible = np.isfinite(logits.max(axis=1))
    values = np.where(is_possible[:, None], logits, 0).astype(np.float64)
    columns = np.argsort(-values, axis=1, kind="stable")[:, : int(settings[:, 0].max())]
    scores = _filter(np.take_along_axis(values, columns, 1), settings, np.zeros(len(logits)))
    scores += gumbel_noise(keys, np.take_along_axis(ids, columns, 1))
    return np.where(is_possible, columns[np.arange(len(columns)), scores.argmax(axis=1)], NO_TOKEN)


def filter_logits(row: Floats, filters: Filters) -> tuple[Ids, Doubles]:
    """The columns of float32[n_vocab] that pass the filters, and their logits after temperature, up to a constant.

    The row must have a finite maximum. These are the logits that `random_sample` draws from.
    """
    settings = np.array([filters], np.float64)
    maxima, bounds = _row_maxima(row[None], settings[:, 0].astype(np.int64))
    floor, mass = _floor(row, float(maxima[0]), float(bounds[0]), filters)
    columns = np.flatnonzero(row >= max(np.float32(floor), _LOWEST))
    if len(columns) > _MAX_BATCHED_CANDIDATES and not filters.top_k and filters.top_p >= 1:
        return columns, row[columns].astype(np.float64) / filters.temperature
    scaled = _filter(row[columns].astype(np.float64)[None], settings, np.array([mass]))[0]
    is_left = np.isfinite(scaled)
    return columns[is_left], scaled[is_left]


def _row_maxima(logits: Floats, top_k: Ids) -> tuple[Floats, Floats]:
    """Each row's largest logit, and a lower bound of its k-th largest (-inf if top-k is off or above 512)."""
    size = logits.shape[1] // _N_BLOCKS * _N_BLOCKS
    if size == 0:
        return logits.max(axis=1), np.full(len(logits), -np.inf, np.float32)
    # k blocks have maxima of at least the k-th largest block maximum, so at least k logits reach it too.
    block_maxima = np.sort(logits[:, :size].reshape(len(logits), -1, _N_BLOCKS).max(axis=1), axis=1)
    maxima = block_maxima[:, -1]
    if size < logits.shape[1]:
        maxima = np.maximum(maxima, logits[:, size:].max(axis=1))
    is_bounded = (top_k > 0) & (top_k <= _N_BLOCKS)
    kth = block_maxima[np.arange(len(logits)), np.where(is_bounded, _N_BLOCKS - top_k, 0)]
    return maxima, np.where(is_bounded, kth, np.float32(-np.inf))


def _floor(row: Floats, maximum: float, bound: float, filters: Filters) -> tuple[float, float]:
    """The logit below which no token passes the filters, and the sum of exp(logit - maximum) for top-p.

    A sum of 0 means that of the candidates.
    """
    top_k, top_p, min_p, _ = filters
    if top_k > _N_BLOCKS:
        k = min(top_k, len(row))
        bound = float(np.partition(row, -k)[-k])
    min_p_floor = maximum + np.log(min_p) if min_p else -np.inf
    if top_p >= 1:
        return max(bound, min_p_floor), 0.0
    if top_k:
        return bound, 0.0
    likelihood = np.exp(row - np.float32(maximum))
    mass = float(likelihood.sum(dtype=np.float64))
    for depth in _DEPTHS:
        if likelihood[np.flatnonzero(row >= maximum - depth)].sum(dtype=np.float64) > top_p * mass:
            return max(maximum - depth, min_p_floor), mass
    return min_p_floor, mass


def _pad_candidates(logits: Floats, candidates: list[tuple[int, Ids]]) -> tuple[Ids, Doubles]:
    """Columns and logits of the rows' candidates, padded with -inf to the longest."""
    width = max(len(own) for _, own in candidates)
    columns = np.zeros((len(candidates), width), np.int64)
    values = np.full((len(candidates), width), -np.inf)
    for i, (row, own) in enumerate(candidates):
        columns[i, : len(own)] = own
        values[i, : len(own)] = logits[row, own]
    return columns, values


def _filter(values: Doubles, settings: Doubles, masses: Doubles) -> Doubles:
    """(logit - maximum) / temperature of the candidates that pass the filters, -inf for the others."""
    top_k, top_p, min_p, temperature = settings.T[:, :, None]
    order = np.argsort(-values, axis=1, kind="stable")
    below = np.take_along_axis(values, order, 1)
    below -= below[:, :1].copy()
    passes = np.isfinite(below) & (np.arange(values.shape[1]) < np.where(top_k > 0, top_k, values.shape[1]))
    likelihood = np.where(passes, np.exp(below), 0.0)
    cumulated = np.cumsum(likelihood, axis=1)
    mass = np.where(masses[:, None] > 0, masses[:, None], cumulated[:, -1:])
    passes &= (cumulated - likelihood < top_p * mass) | (top_p >= 1)  # the token that reaches p is kept
    passes &= likelihood >= min_p
    passes[:, 0] = True
    scaled = np.empty_like(values)
    np.put_along_axis(scaled, order, np.where(passes, below / temperature, -np.inf), 1)
    return scaled


def _sample_cumulative(below: Floats, temperature: float, key: np.uint64) -> int:
    """Samples by cumulative probabilities and one random number. `below`: logit - maximum of each candidate."""
    weights = np.cumsum(np.exp(below / np.float32(temperature)), dtype=np.float64)
    return min(int(np.searchsorted(weights, unit_interval(key) * weights[-1], side="right")), len(below) - 1)


# Random numbers as a function of a seed, a position and a token id (counter-based, without state).
#
# The n-th token of a sequence gets the same numbers regardless of the batch, preemption, and recomputation after a
# crash, so there is no generator state to save.


Bits = TypeVar("Bits", UInt64, np.uint64)

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ULP = 2.0**-53


def random_bits(seeds: UInt64, positions: UInt64) -> UInt64:
    """64 random bits for each pair, uint64[n]: number `position` of the SplitMix64 stream that the seed selects.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014 (doi 10.1145/2660193.2660195).
    """
    with np.errstate(over="ignore"):
        return _mix(_mix(seeds + _GAMMA) + (positions + np.uint64(1)) * _GAMMA)


def unit_interval(keys: Bits) -> Doubles | float:
    """Converts 64 random bits into a float64 in [0, 1), elementwise."""
    numbers: Doubles | float = (keys >> np.uint64(11)) * _ULP
    return numbers


def gumbel_noise(keys: UInt64, tokens: npt.NDArray[np.int64]) -> Doubles:
    """Gumbel noise for each token of a row, float64[n, width], from the row's key and the token id.

    The argmax of logits plus this noise is a sample of their softmax (Gumbel, 1954). A token's noise is independent of
    other tokens, so a change in the last bits of the logits hardly ever changes the sample.
    """
    with np.errstate(over="ignore"):
        random = _mix(keys[:, None] + (tokens.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    noise: Doubles = -np.log(-np.log(((random >> np.uint64(12)) + 0.5) * (2 * _ULP)))  # in (0, 1): both logs are finite
    return noise


def _mix(z: UInt64) -> UInt64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = z ^ (z >> np.uint64(31))
    return mixed
