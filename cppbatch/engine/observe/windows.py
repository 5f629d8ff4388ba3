"""Values of the last minute, and histograms."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Generic, TypeVar

import msgspec

SPAN = 60.0  # seconds

Row = TypeVar("Row")


class Window(Generic[Row]):
    """Rows of values of the last minute, or of a shorter time if there are more than `max_rows`."""

    def __init__(self, clock: Callable[[], float] = perf_counter, max_rows: int = 16_384) -> None:
        self._rows: deque[tuple[float, Row]] = deque(maxlen=max_rows)
        self._clock = clock
        self._began = clock()

    def add(self, row: Row) -> None:
        """Adds a row with the current time."""
        now, rows = self._clock(), self._rows
        rows.append((now, row))
        if rows[0][0] < now - SPAN:  # removes one per added row; the rest when rows are read
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
    """The smallest value that is at least as large as this share (0 to 1) of all values; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for times of steps and their parts."""
ROWS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0)
"""Bounds for batch sizes."""


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """The number of values in each bin."""

    bounds: list[float]
    """Upper bounds of the bins, inclusive."""
    counts: list[int]
    """Values in each bin. One more than bounds: the last bin counts values above all bounds."""
    sum: float
    """The sum of the values."""


class Bins:
    """Counts values into a histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, n: int = 1) -> None:
        """Counts a value `n` times."""
        self._counts[bisect_left(self._bounds, value)] += n
        self._sum += n * value

    def histogram(self) -> Histogram:
        """The values so far."""
        return Histogram(bounds=list(self._bounds), counts=list(self._counts), sum=self._sum)


def merge_histograms(histograms: list[Histogram]) -> Histogram:
    """The sum of histograms, which must have the same bounds."""
    counts = zip(*(each.counts for each in histograms), strict=True)
    return Histogram(
        bounds=histograms[0].bounds, counts=[sum(of_bin) for of_bin in counts], sum=sum(each.sum for each in histograms)
    )
