"""What a worker was doing, readable after its death: a few numbers in memory that both processes map.

Messages would not do: a process that aborts takes along those that it has just sent.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from cppbatch.config import MAX_SEQ_IDS

_N_PREPARING = 8
_BEATS, _N_RUNNING, _PREPARING, _RUNNING = 0, 1, 2, 2 + _N_PREPARING
_N_NUMBERS = _RUNNING + MAX_SEQ_IDS


class SharedStatus:
    """A file of int64 numbers. The worker writes; the server's process only reads."""

    def __init__(self, path: Path) -> None:
        """Makes the file if there is none."""
        if not path.exists():
            empty = np.zeros(_N_NUMBERS, np.int64)
            empty[_PREPARING:_RUNNING] = -1
            path.write_bytes(empty.tobytes())
        with path.open("r+b") as file:
            self._numbers = np.frombuffer(mmap.mmap(file.fileno(), _N_NUMBERS * 8), np.int64)

    # --- the worker's side ------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """It is alive."""
        self._numbers[_BEATS] += 1

    def prepares(self, slot: int, number: int) -> None:
        """Thread `slot` prepares this request; -1: none."""
        self._numbers[_PREPARING + slot] = number

    def runs(self, numbers: list[int]) -> None:
        """These requests are computed in the step that comes now."""
        self._numbers[_RUNNING : _RUNNING + len(numbers)] = numbers
        self._numbers[_N_RUNNING] = len(numbers)

    # --- the server's side ------------------------------------------------------------------------------------------

    @property
    def beats(self) -> int:
        """Goes up as long as the worker steps, or waits for something to do."""
        return int(self._numbers[_BEATS])

    def preparing(self) -> list[int]:
        """The requests that it prepares."""
        return [int(number) for number in self._numbers[_PREPARING:_RUNNING] if number >= 0]

    def at_work(self) -> set[int]:
        """The requests that it computed something of, or prepared, last."""
        running = self._numbers[_RUNNING : _RUNNING + int(self._numbers[_N_RUNNING])]
        return {*running.tolist(), *self.preparing()}
