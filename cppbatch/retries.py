"""Pauses between attempts at what fails, each twice as long as the one before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec

_MOST_DOUBLINGS = 64
"""More of them would exceed any pause, and after a thousand of them a float: what fails every minute for a day."""


class Pauses(msgspec.Struct, frozen=True):
    """Pauses from `first_s` to `longest_s` seconds. Iteration yields one after each attempt, without end."""

    first_s: float
    longest_s: float

    def after(self, n_failures: int) -> float:
        """Seconds to wait after this many consecutive failures, at least 1."""
        return min(self.longest_s, self.first_s * 2.0 ** min(n_failures - 1, _MOST_DOUBLINGS))

    def __iter__(self) -> Iterator[float]:
        return map(self.after, count(1))


class RestartPauses:
    """The waits before restarts of a process that dies: 0.2 s, doubling each time up to 30 s."""

    def __init__(self) -> None:
        self._pauses = Pauses(0.2, 30.0)
        self._n_in_a_row = 0

    def next(self, lived_s: float) -> float:
        """Seconds to wait after a crash."""
        # a crash after a minute of work is the first in a row
        self._n_in_a_row = 1 if lived_s >= 60.0 else self._n_in_a_row + 1
        return self._pauses.after(self._n_in_a_row)
