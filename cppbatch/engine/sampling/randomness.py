"""Random numbers as a function of a seed, a position and a token id (counter-based, without state).

The n-th token of a sequence gets the same numbers regardless of the batch, of preemption, and of being recomputed after
a crash, so there is no generator state to save.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]
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

    The argmax of logits plus this noise is a sample of their softmax (Gumbel, 1954). The noise of a token does not
    depend on the other tokens, so a change in the last bits of the logits hardly ever changes the sample.
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
