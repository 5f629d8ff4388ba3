"""What a worker is doing, in memory that its server can still read after the worker's death.

Messages are no substitute: a process that aborts loses the messages it has just sent.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from cppbatch.config import MAX_SEQ_IDS

_N_PREPARING = 8
_HEARTBEATS, _N_COMPUTING, _PREPARING, _PROGRESS = 0, 1, 2, 2 + _N_PREPARING  # offsets
_COMPUTING = _PROGRESS + _N_PREPARING
_N_NUMBERS = _COMPUTING + MAX_SEQ_IDS


class SharedStatus:
    """A memory-mapped file of int64 numbers. The worker writes, the server's process reads.

    Layout: the heartbeat counter; how many requests are computed; the request that each of 8 threads prepares (-1:
    none), and a counter of its progress; the requests that are computed.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or creates it."""
        if not path.exists():
            empty = np.zeros(_N_NUMBERS, np.int64)
            empty[_PREPARING:_PROGRESS] = -1
            path.write_bytes(empty.tobytes())
        with path.open("r+b") as file:
            self._numbers = np.frombuffer(mmap.mmap(file.fileno(), _N_NUMBERS * 8), np.int64)
        self._computing: list[int] = []

    # --- written by the worker --------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Counts one more heartbeat."""
        self._numbers[_HEARTBEATS] += 1

    def set_preparing(self, thread: int, number: int) -> None:
        """Thread `thread` (0 to 7) prepares this request; -1: none."""
        self._numbers[_PREPARING + thread] = number

    def progressed(self, thread: int) -> None:
        """Thread `thread` goes on preparing its request, or waits for a reason: it does not hang."""
        self._numbers[_PROGRESS + thread] += 1

    def set_computing(self, numbers: list[int]) -> None:
        """The next step computes these requests: only these can crash it."""
        if numbers != self._computing:
            self._numbers[_COMPUTING : _COMPUTING + len(numbers)] = numbers
            self._numbers[_N_COMPUTING] = len(numbers)
            self._computing = numbers

    # --- read by the server's process -------------------------------------------------------------------------------

    @property
    def heartbeats(self) -> int:
        """Increases with each step, and every second while the worker is idle."""
        return int(self._numbers[_HEARTBEATS])

    def preparing(self) -> list[int]:
        """The requests that are being prepared."""
        return [int(number) for number in self._numbers[_PREPARING:_PROGRESS] if number >= 0]

    def progress(self) -> list[tuple[int, int]]:
        """The same, each with the counter of its progress."""
        both = self._numbers[_PREPARING:_COMPUTING].reshape(2, _N_PREPARING).T
        return [(int(number), int(counter)) for number, counter in both if number >= 0]

    def active(self) -> set[int]:
        """The requests that are being prepared, or were computed in the last step."""
        computing = self._numbers[_COMPUTING : _COMPUTING + int(self._numbers[_N_COMPUTING])]
        return {*computing.tolist(), *self.preparing()}
