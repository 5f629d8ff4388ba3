"""Top-k, top-p, min-p, temperature and the draw itself, for all rows of a step at once.

The same distribution as llama.cpp's samplers in their default order (tests/test_draw.py compares 20,000 draws of each):
the filters see the logits before temperature. Only tokens above a floor are looked at, below which none can survive
the filters: of 49,152 logits these are some fifty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

IMPOSSIBLE = -1
"""In place of a token: the row has none to draw (all -inf, or a NaN)."""

_N_BLOCKS = 512  # parts of a row whose maxima bound its k-th largest logit, for k up to their number
_DEPTHS = 2.0, 4.0, 8.0, 12.0  # below the largest logit: most often all that top-p keeps lies above one of these
_WIDE = 256  # candidates; rows with more are drawn one by one, so that they do not make the others' arrays wide


class Filters(NamedTuple):
    """One row's settings. `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    top_k: int
    top_p: float
    min_p: float
    temperature: float


def draw(logits: Floats, filters: Sequence[Filters], uniforms: Doubles) -> Ids:
    """A token for each row of float32[n, n_vocab], or `IMPOSSIBLE`; `uniforms` in [0, 1), one a row, decide which.

    A row's token depends on that row, its filters and its number only.
    """
    n_vocab = logits.shape[1]
    settings = np.array(filters, np.float64)
    peaks, bounds = _peaks(logits, settings[:, 0].astype(np.int64))
    possible = np.flatnonzero(np.isfinite(peaks))
    masses, floors = np.zeros(len(logits)), np.empty(len(logits), np.float32)
    candidates: dict[int, Ids] = {}
    for row in possible.tolist():
        bound = float(bounds[row])
        if filters[row].top_k > _N_BLOCKS:
            k = min(filters[row].top_k, n_vocab)
            bound = float(np.partition(logits[row], -k)[-k])
        floors[row], masses[row] = _floor(logits[row], float(peaks[row]), bound, filters[row])
        candidates[row] = np.flatnonzero(logits[row] >= floors[row])
    tokens = np.full(len(logits), IMPOSSIBLE, np.int64)
    narrow = [row for row, ids in candidates.items() if len(ids) <= _WIDE]
    wide = [row for row, ids in candidates.items() if len(ids) > _WIDE]
    ordered = [row for row in wide if filters[row].top_k or filters[row].top_p < 1]
    for rows in ([narrow] if narrow else []) + [[row] for row in ordered]:
        ids, values = _padded(logits, [(row, candidates[row]) for row in rows])
        tokens[rows] = _choose(ids, values, settings[rows], masses[rows], uniforms[rows])
    for row in set(wide).difference(ordered):
        ids = candidates[row]
        tokens[row] = ids[_pick(logits[row, ids] - peaks[row], filters[row].temperature, float(uniforms[row]))]
    return tokens


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
    """Ids and logits of the rows' candidates, the likeliest first, filled up with -inf."""
    width = max(len(ids) for _, ids in candidates)
    all_ids = np.zeros((len(candidates), width), np.int64)
    values = np.full((len(candidates), width), -np.inf)
    for i, (row, ids) in enumerate(candidates):
        all_ids[i, : len(ids)] = ids
        values[i, : len(ids)] = logits[row, ids]
    return all_ids, values


def _choose(ids: Ids, values: Doubles, settings: Doubles, masses: Doubles, uniforms: Doubles) -> Ids:
    """Filters exactly and draws: a token id a row."""
    top_k, top_p, min_p, temperature = settings.T[:, :, None]
    n_rows, width = values.shape
    order = np.argsort(-values, axis=1, kind="stable")
    ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
    below = values - values[:, :1]
    alive = np.isfinite(below) & (np.arange(width) < np.where(top_k > 0, top_k, width))
    likelihood = np.where(alive, np.exp(below), 0.0)
    cumulated = np.cumsum(likelihood, axis=1)
    mass = np.where(masses[:, None] > 0, masses[:, None], cumulated[:, -1:])
    alive &= (cumulated - likelihood < top_p * mass) | (top_p >= 1)  # the token that reaches p is among them
    alive &= likelihood >= min_p
    alive[:, 0] = True
    weights = np.cumsum(np.where(alive, np.exp(below / temperature), 0.0), axis=1)
    picks = (weights <= uniforms[:, None] * weights[:, -1:]).sum(axis=1)
    chosen: Ids = ids[np.arange(n_rows), np.minimum(picks, alive.sum(axis=1) - 1)]  # rounding may reach the very end
    return chosen


def _pick(below: Floats, temperature: float, uniform: float) -> int:
    """Draws among many candidates, `below` the largest logit by so much, where no filter needs them in order."""
    weights = np.cumsum(np.exp(below / np.float32(temperature)), dtype=np.float64)
    return min(int(np.searchsorted(weights, uniform * weights[-1], side="right")), len(below) - 1)
