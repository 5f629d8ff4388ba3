"""Figures of the last minute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Generic, TypeVar

SPAN = 60.0  # seconds

Row = TypeVar("Row")


class Window(Generic[Row]):
    """Rows of figures of the last minute, or of a shorter time if there are more than `max_rows`."""

    def __init__(self, max_rows: int, clock: Callable[[], float] = perf_counter) -> None:
        self._rows: deque[tuple[float, Row]] = deque(maxlen=max_rows)
        self._clock = clock
        self._began = clock()

    def add(self, row: Row) -> None:
        """Adds a row with the present time."""
        now, rows = self._clock(), self._rows
        rows.append((now, row))
        if rows[0][0] < now - SPAN:  # one for one: the others are forgotten when the rows are read
            rows.popleft()

    def rows(self) -> list[Row]:
        """The rows of the last minute, oldest first."""
        rows, since = self._rows, self._clock() - SPAN
        while rows and rows[0][0] < since:
            rows.popleft()
        return [row for _, row in rows]

    @property
    def seconds(self) -> float:
        """The time that the rows cover: a minute, or less."""
        now = self._clock()
        full = len(self._rows) == self._rows.maxlen
        return min(SPAN, now - (self._rows[0][0] if full else self._began))


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that is at least as large as this share (0 to 1) of all values; None if there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
