"""One figure measured several times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """The median of some measurements, and the least and the largest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    def text(self, digits: int) -> str:
        """`142.1 ±3.0`: the median and half of the range; without that where there was one measurement."""
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ±{(self.high - self.low) / 2:.{digits}f}"
