"""Random numbers that depend on a seed and a position, and on nothing else.

A sequence's n-th token gets the same numbers whatever shared its batch, however often it was preempted, and when it is
computed again after a crash: there is no state to save.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]
Bits = TypeVar("Bits", UInt64, np.uint64)

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_TO_UNIT = 2.0**-53


def bits(seeds: UInt64, positions: UInt64) -> UInt64:
    """64 random bits for each pair, uint64[n]: number `position` of the SplitMix64 stream that the seed chooses.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014 (doi 10.1145/2660193.2660195).
    """
    with np.errstate(over="ignore"):
        return _mix(_mix(seeds + _GAMMA) + (positions + np.uint64(1)) * _GAMMA)


def to_unit(keys: Bits) -> Doubles | float:
    """64 random bits as a number in [0, 1), each."""
    numbers: Doubles | float = (keys >> np.uint64(11)) * _TO_UNIT
    return numbers


def gumbel(keys: UInt64, tokens: npt.NDArray[np.int64]) -> Doubles:
    """Noise for each token of a row, float64[n, width], from the row's key and the token's id.

    Where logits with such noise are largest, a token is drawn from their softmax (Gumbel, 1954). Each token has noise
    of its own, so a change in the last bits of the logits hardly ever draws another one.
    """
    with np.errstate(over="ignore"):
        random = _mix(keys[:, None] + (tokens.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    noise: Doubles = -np.log(-np.log(((random >> np.uint64(12)) + 0.5) * (2 * _TO_UNIT)))  # never log 0, nor log 1
    return noise


def _mix(z: UInt64) -> UInt64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = z ^ (z >> np.uint64(31))
    return mixed
