"""What happened in the last minute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import perf_counter

SPAN = 60.0  # seconds

Row = tuple[float, ...]


class Window:
    """Rows of figures, each forgotten after a minute, or earlier when there are more than `most`."""

    def __init__(self, most: int, clock: Callable[[], float] = perf_counter) -> None:
        self._rows: deque[tuple[float, Row]] = deque(maxlen=most)
        self._clock = clock
        self._began = clock()

    def add(self, row: Row) -> None:
        """Notes a row, now."""
        now = self._clock()
        self._rows.append((now, row))
        self._forget(now)

    def rows(self) -> list[Row]:
        """Those of the last minute, the oldest first."""
        self._forget(self._clock())
        return [row for _, row in self._rows]

    @property
    def seconds(self) -> float:
        """How long a time the rows are of: a minute, or less."""
        now = self._clock()
        full = len(self._rows) == self._rows.maxlen
        return min(SPAN, now - (self._rows[0][0] if full else self._began))

    def _forget(self, now: float) -> None:
        rows = self._rows
        while rows and rows[0][0] < now - SPAN:
            rows.popleft()


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed; None if there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
