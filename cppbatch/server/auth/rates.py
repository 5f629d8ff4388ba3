"""Requests per minute of API keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class RateState(NamedTuple):
    """The rate limit state of a key."""

    limit: int
    """Requests per minute."""
    remaining: int
    """Requests allowed now."""
    wait: float
    """Seconds until the next request is allowed; 0: now."""
    reset: float
    """Seconds until `remaining` is `limit` again."""


class RequestRates:
    """A token bucket per key: it holds one minute's requests, and fills evenly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: dict[str, float] = {}  # by key: when its bucket is full again

    def take(self, key: str, per_minute: int) -> tuple[bool, RateState]:
        """Takes a request from the key's bucket. Returns whether one was available, and the new state."""
        return self._take(key, per_minute, reserve=0)

    def take_for_batch(self, key: str, per_minute: int) -> tuple[bool, RateState]:
        """Like `take`, but leaves half of the bucket for interactive requests."""
        return self._take(key, per_minute, reserve=min(per_minute / 2, per_minute - 1))

    def _take(self, key: str, per_minute: int, *, reserve: float) -> tuple[bool, RateState]:
        now, interval = self._clock(), 60.0 / per_minute
        reset = max(0.0, self._full_at.get(key, now) - now)
        wait = reset + (1 + reserve - per_minute) * interval
        taken = wait <= 1e-9
        if taken:
            reset += interval
            self._full_at[key] = now + reset
        remaining = int(per_minute - reset / interval + 1e-9)
        return taken, RateState(per_minute, remaining, max(0.0, wait), reset)
