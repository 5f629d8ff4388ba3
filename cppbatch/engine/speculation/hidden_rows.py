"""Hidden rows of the model, kept on the host until drafts are asked for: those of each sequence that its draft head or
draft model has not read yet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
"""float32[n, n_embd]"""
Row = npt.NDArray[np.float32]
"""float32[n_embd]"""

MOST_BYTES = 256 << 20
"""Of all hidden rows that are kept on the host."""
_LEAST_ROWS, _MOST_ROWS = 64, 4096  # of a sequence
_FIRST = 16  # rows: of a sequence that decodes


def most_rows(n_parallel: int, n_row: int) -> int:
    """How many hidden rows of each sequence are kept at most, of `n_row` numbers each."""
    return min(max(MOST_BYTES // (4 * n_parallel * n_row), _LEAST_ROWS), _MOST_ROWS)


class HiddenRows:
    """The rows of the tokens from `start` up to `stop` of a sequence, the latest ones."""

    __slots__ = ("_rows", "start", "stop")

    def __init__(self, n_embd: int) -> None:
        self._rows: Rows = np.empty((_FIRST, n_embd), np.float32)
        self.start = self.stop = 0

    def put(self, start: int, rows: Rows, most: int) -> None:
        """Those of the tokens from `start` on were computed, which replace what was known of these. Behind a gap only
        they are left; of more than `most` rows, the older half is forgotten."""
        stop = start + len(rows)
        if len(rows) > most:
            rows, start = rows[-most:], stop - most
        if not self.start <= start <= self.stop:
            self.start = self.stop = start
        elif stop - self.start > most:
            self.forget(stop - max(len(rows), most // 2))
        at, n = start - self.start, stop - self.start
        if n > len(self._rows):
            larger = np.empty((min(most, max(n, 2 * len(self._rows))), self._rows.shape[1]), np.float32)
            larger[:at] = self._rows[:at]
            self._rows = larger
        self._rows[at:n] = rows
        self.stop = stop

    def rows(self, start: int, stop: int) -> Rows:
        """A view of those of the tokens from `start` up to `stop`, all of them known."""
        assert self.start <= start <= stop <= self.stop, f"rows {start} to {stop} of {self.start} to {self.stop}"
        return self._rows[start - self.start : stop - self.start]

    def forget(self, start: int) -> None:
        """Rows before `start` are not needed any more."""
        if start <= self.start:
            return
        start = min(start, self.stop)
        n = self.stop - start
        if n:
            self._rows[:n] = self._rows[start - self.start : start - self.start + n].copy()
        self.start = start
