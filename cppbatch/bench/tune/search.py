"""The rules by which settings are chosen. They know curves, not models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log2

import msgspec

LEAST_GAIN = 0.10
"""What doubling the parallelism must add to the tokens/s of all sequences together to be worth it."""
LEAST_DIFFERENCE = 0.03
"""By how much another setting must be faster to be preferred: below that it is noise."""


class Speed(msgspec.Struct, frozen=True):
    """What so many sequences at once reach."""

    n_parallel: int
    tokens_per_s: float
    """Of all sequences together."""
    inter_token_ms: float
    """Time between two tokens of one sequence, the median."""


def largest_fitting(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from `low` to `high` that fits, if all below one that fits do too; None: not even `low`.

    Asks for `high` first, which mostly settles it, then halves what is left.
    """
    if fits(high):
        return high
    if low == high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def knee(speeds: Sequence[Speed], target_ms: float | None = None) -> Speed:
    """The least parallelism from which the next larger one gains less than `LEAST_GAIN` for each doubling.

    `speeds`: at least one, by rising parallelism. `target_ms`: sequences must not wait longer for a token, if any
    parallelism keeps to it; where none does, the least one is taken.
    """
    allowed = [speed for speed in speeds if target_ms is None or speed.inter_token_ms <= target_ms]
    if not allowed:
        return speeds[0]
    for this, following in pairwise(allowed):
        if not is_worth_it(this, following):
            return this
    return allowed[-1]


def is_worth_it(this: Speed, following: Speed) -> bool:
    """Whether so much more parallelism gains enough."""
    least: float = (1 + LEAST_GAIN) ** log2(following.n_parallel / this.n_parallel)
    return following.tokens_per_s >= this.tokens_per_s * least


def fastest(speeds: Sequence[float | None]) -> int | None:
    """The place of the fastest, or of an earlier one that is about as fast. None stands for what does not work."""
    best = max((speed for speed in speeds if speed is not None), default=0.0)
    good = [i for i, speed in enumerate(speeds) if speed is not None and speed * (1 + LEAST_DIFFERENCE) >= best]
    return good[0] if good else None


def doublings(most: int) -> list[int]:
    """1, 2, 4 ... and `most` itself."""
    return [n for n in (1 << i for i in range(most.bit_length())) if n < most] + [most]
