"""Top-k, top-p, min-p, temperature and the draw itself, for all rows of a step at once.

The same distribution as llama.cpp's samplers in their default order (tests/unit/test_draw.py compares 20,000 draws of
each): the filters see the logits before temperature. Only tokens above a floor are looked at, below which none can
survive the filters: of 49,152 logits these are some fifty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling.randomness import gumbel, to_unit

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

IMPOSSIBLE = -1
"""In place of a place: the row has none to draw (all -inf, or a NaN)."""

_LOWEST = np.finfo(np.float32).min  # not -inf: of a row with a grammar nearly all is
_N_BLOCKS = 512  # parts of a row whose maxima bound its k-th largest logit, for k up to their number
_DEPTHS = 2.0, 4.0, 8.0, 12.0  # below the largest logit: most often all that top-p keeps lies above one of these
_WIDE = 256  # candidates; rows with more are drawn one by one, so that they do not make the others' arrays wide


class Filters(NamedTuple):
    """One row's settings. `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    top_k: int
    top_p: float
    min_p: float
    temperature: float


def draw(logits: Floats, filters: Sequence[Filters], keys: UInt64, ids: Ids | None = None) -> Ids:
    """A place in each row of float32[n, width], or `IMPOSSIBLE`; `keys`, 64 random bits a row, decide which.

    `ids`, int64[n, width]: the tokens of the places, where they are not the whole vocabulary. What is drawn depends on
    the row, its filters and its key only; and little on the last bits of its logits, which other batches change.
    """
    settings = np.array(filters, np.float64)
    peaks, bounds = _peaks(logits, settings[:, 0].astype(np.int64))
    masses, candidates = np.zeros(len(logits)), {}
    for row in np.flatnonzero(np.isfinite(peaks)).tolist():
        floor, masses[row] = _floor(logits[row], float(peaks[row]), float(bounds[row]), filters[row])
        candidates[row] = np.flatnonzero(logits[row] >= max(np.float32(floor), _LOWEST))
    drawn = np.full(len(logits), IMPOSSIBLE, np.int64)
    narrow = [row for row, own in candidates.items() if len(own) <= _WIDE]
    wide = [row for row, own in candidates.items() if len(own) > _WIDE]
    ordered = [row for row in wide if filters[row].top_k or filters[row].top_p < 1]
    for rows in ([narrow] if narrow else []) + [[row] for row in ordered]:
        places, values = _padded(logits, [(row, candidates[row]) for row in rows])
        tokens = places if ids is None else np.take_along_axis(ids[rows], places, 1)
        scores = _filtered(values, settings[rows], masses[rows]) + gumbel(keys[rows], tokens)
        drawn[rows] = places[np.arange(len(rows)), scores.argmax(axis=1)]
    for row in set(wide).difference(ordered):
        below = logits[row, candidates[row]] - peaks[row]
        drawn[row] = candidates[row][_pick(below, filters[row].temperature, keys[row])]
    return drawn


def _peaks(logits: Floats, top_k: Ids) -> tuple[Floats, Floats]:
    """Each row's largest logit, and a lower bound of its k-th largest (-inf where there is no k to bound)."""
    size = logits.shape[1] // _N_BLOCKS * _N_BLOCKS
    if size == 0:
        return logits.max(axis=1), np.full(len(logits), -np.inf, np.float32)
    # k blocks have maxima no smaller than the k-th largest maximum, so k logits are no smaller either.
    maxima = np.sort(logits[:, :size].reshape(len(logits), -1, _N_BLOCKS).max(axis=1), axis=1)
    peaks = maxima[:, -1]
    if size < logits.shape[1]:
        peaks = np.maximum(peaks, logits[:, size:].max(axis=1))
    bounded = (top_k > 0) & (top_k <= _N_BLOCKS)
    kth = maxima[np.arange(len(logits)), np.where(bounded, _N_BLOCKS - top_k, 0)]
    return peaks, np.where(bounded, kth, np.float32(-np.inf))


def _floor(row: Floats, peak: float, bound: float, filters: Filters) -> tuple[float, float]:
    """The logit below which no token survives the filters, and the mass over which top-p sums (0: the candidates')."""
    top_k, top_p, min_p, _ = filters
    if top_k > _N_BLOCKS:
        k = min(top_k, len(row))
        bound = float(np.partition(row, -k)[-k])
    of_min_p = peak + np.log(min_p) if min_p else -np.inf
    if top_p >= 1:
        return max(bound, of_min_p), 0.0
    if top_k:
        return bound, 0.0
    likelihood = np.exp(row - np.float32(peak))
    mass = float(likelihood.sum(dtype=np.float64))
    for below in _DEPTHS:
        if likelihood[np.flatnonzero(row >= peak - below)].sum(dtype=np.float64) > top_p * mass:
            return max(peak - below, of_min_p), mass
    return of_min_p, mass


def _padded(logits: Floats, candidates: list[tuple[int, Ids]]) -> tuple[Ids, Doubles]:
    """Places and logits of the rows' candidates, filled up with -inf."""
    width = max(len(own) for _, own in candidates)
    places = np.zeros((len(candidates), width), np.int64)
    values = np.full((len(candidates), width), -np.inf)
    for i, (row, own) in enumerate(candidates):
        places[i, : len(own)] = own
        values[i, : len(own)] = logits[row, own]
    return places, values


def _filtered(values: Doubles, settings: Doubles, masses: Doubles) -> Doubles:
    """The logits over temperature, of candidates that survive the filters, else -inf."""
    top_k, top_p, min_p, temperature = settings.T[:, :, None]
    order = np.argsort(-values, axis=1, kind="stable")
    below = np.take_along_axis(values, order, 1)
    below -= below[:, :1].copy()
    alive = np.isfinite(below) & (np.arange(values.shape[1]) < np.where(top_k > 0, top_k, values.shape[1]))
    likelihood = np.where(alive, np.exp(below), 0.0)
    cumulated = np.cumsum(likelihood, axis=1)
    mass = np.where(masses[:, None] > 0, masses[:, None], cumulated[:, -1:])
    alive &= (cumulated - likelihood < top_p * mass) | (top_p >= 1)  # the token that reaches p is among them
    alive &= likelihood >= min_p
    alive[:, 0] = True
    scaled = np.empty_like(values)
    np.put_along_axis(scaled, order, np.where(alive, below / temperature, -np.inf), 1)
    return scaled


def _pick(below: Floats, temperature: float, key: np.uint64) -> int:
    """Draws among many candidates, `below` the largest logit by so much, by one number for all of them."""
    weights = np.cumsum(np.exp(below / np.float32(temperature)), dtype=np.float64)
    return min(int(np.searchsorted(weights, to_unit(key) * weights[-1], side="right")), len(below) - 1)
