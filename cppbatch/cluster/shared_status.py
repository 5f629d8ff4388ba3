"""A worker's state, in memory that its server can still read after the worker's death.

Messages do not suffice: a process that aborts loses the messages it has just sent.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cppbatch.config import MAX_SEQ_IDS

_N_PREPARING = 9  # the threads of `InputThreads`
_HEARTBEATS, _N_COMPUTING, _PREPARING, _PROGRESS = 0, 1, 2, 2 + _N_PREPARING  # offsets
_COMPUTING = _PROGRESS + _N_PREPARING
_N_NUMBERS = _COMPUTING + MAX_SEQ_IDS


class SharedStatus:
    """A memory-mapped file of int64 numbers. The worker writes, the server's process reads.

    Layout: the heartbeat counter; the number of computed requests; the request that each of 9 threads is preparing (-1:
    none), and its progress counter; the computed requests.
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
        self._lock = threading.Lock()
        self._threads: dict[int, int] = {}  # numbers of the threads that prepare requests

    # --- written by the worker --------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Increments the heartbeat counter."""
        self._numbers[_HEARTBEATS] += 1

    @contextmanager
    def while_preparing(self, number: int) -> Iterator[Callable[[], None]]:
        """Records that this thread prepares a request. Yields a function that reports progress, or a legitimate wait:
        the thread does not hang."""
        with self._lock:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))

        def progressed() -> None:
            self._numbers[_PROGRESS + thread] += 1

        self._numbers[_PREPARING + thread] = number
        try:
            yield progressed
        finally:
            self._numbers[_PREPARING + thread] = -1

    def set_computing(self, numbers: list[int]) -> None:
        """Sets the requests of the next step: only these can crash it."""
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
        """The requests being prepared."""
        return [int(number) for number in self._numbers[_PREPARING:_PROGRESS] if number >= 0]

    def progress(self) -> list[tuple[int, int]]:
        """The requests being prepared, each with its progress counter."""
        both = self._numbers[_PREPARING:_COMPUTING].reshape(2, _N_PREPARING).T
        return [(int(number), int(counter)) for number, counter in both if number >= 0]

    def active(self) -> set[int]:
        """The requests being prepared, or computed in the last step."""
        computing = self._numbers[_COMPUTING : _COMPUTING + int(self._numbers[_N_COMPUTING])]
        return {*computing.tolist(), *self.preparing()}
