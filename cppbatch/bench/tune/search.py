"""The rules for choosing settings from measured speeds. They do not know the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

MIN_GAIN = 0.10
"""The least gain in total tokens/s that justifies a larger parallelism."""
MIN_DIFFERENCE = 0.03
"""The least difference in speed that is not noise."""


class Speed(msgspec.Struct, frozen=True):
    """The speed of `n_parallel` sequences at once."""

    n_parallel: int
    tokens_per_s: float
    """Of all sequences together."""
    inter_token_ms: float
    """Median time between two tokens of one sequence."""


def largest_fitting(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Returns the largest number from `low` to `high` that fits, None if `low` does not.

    All numbers below one that fits must fit too. Tries `high` first, since it usually fits, then bisects.
    """
    if fits(high):
        return high
    if low == high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def knee(speeds: Sequence[Speed], target_ms: float | None = None, others: Sequence[Speed] = ()) -> Speed:
    """Returns the smallest parallelism that is about as fast as the fastest one: less than `MIN_GAIN` slower.

    `speeds`: at least one, by increasing parallelism. `target_ms`: the longest allowed time between two tokens. If no
    parallelism meets it, returns the smallest. `others`: measured with other settings; if they are clearly faster than
    all of `speeds`, returns the fastest.
    """
    allowed = within(speeds, target_ms)
    if not allowed:
        return speeds[0]
    rivals = [*allowed, *within(others, target_ms)]
    good = [speed for speed in allowed if not any(is_gain(speed, rival) for rival in rivals)]
    return good[0] if good else max(allowed, key=lambda speed: speed.tokens_per_s)


def within(speeds: Sequence[Speed], target_ms: float | None) -> list[Speed]:
    """Returns those with at most this time between two tokens."""
    return [speed for speed in speeds if target_ms is None or speed.inter_token_ms <= target_ms]


def is_gain(this: Speed, other: Speed) -> bool:
    """Whether `other` is clearly faster in total."""
    return other.tokens_per_s >= this.tokens_per_s * (1 + MIN_GAIN)


def contradicting(smaller: Speed, larger: Speed) -> Speed | None:
    """Returns the measurement that something has slowed down, if both cannot be right; else None.

    A larger batch is not slower in total, and not faster for each of its sequences.
    """
    if larger.tokens_per_s * (1 + MIN_DIFFERENCE) < smaller.tokens_per_s:
        return larger
    return smaller if larger.inter_token_ms * (1 + MIN_GAIN) < smaller.inter_token_ms else None


def fastest(speeds: Sequence[float | None]) -> int | None:
    """Returns the index of the fastest, or of an earlier one that is about as fast. A speed of None: does not work."""
    best = max((speed for speed in speeds if speed is not None), default=0.0)
    good = [i for i, speed in enumerate(speeds) if speed is not None and speed * (1 + MIN_DIFFERENCE) >= best]
    return good[0] if good else None


def doublings(most: int) -> list[int]:
    """Returns 1, 2, 4 ... and `most` itself."""
    return [n for n in (1 << i for i in range(most.bit_length())) if n < most] + [most]
