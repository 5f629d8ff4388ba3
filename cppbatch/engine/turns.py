"""Several threads on one engine: they take turns, so that one of them steps while the others wait for their events."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from cppbatch.errors import EngineClosed
from cppbatch.interrupts import interrupts_deferred

Result = TypeVar("Result")


class Turns:
    """The order in which threads use an engine: first come, first served, one at a time.

    A turn is a step, or work between two steps (add, cancel ...). So a thread that adds a request waits for at most the
    step that runs. During a turn no lock is held. Ctrl-C in a turn takes effect at its end, so it interrupts no step.

    An engine that has a thread of its own (`LocalEngine`, a worker) calls `compute` there and needs no turns for it.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition(threading.Lock())  # notified at the end of each turn
        self._n_taken = self._n_ended = 0  # turns
        self._thread: int | None = None  # whose turn it is

    @property
    def in_fork(self) -> bool:
        """Whether this process is a fork of the process that loaded the engine."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raises `EngineClosed` in a forked process: llama.cpp's compute threads do not exist there."""
        if self.in_fork:
            raise EngineClosed(
                f"the engine was loaded by process {self._process}, and this is process {os.getpid()}, a fork of it, "
                "where llama.cpp's compute threads do not exist: load the engine after the fork, or run "
                "`cppbatch serve` and send requests from all processes"
            )

    def run(self, work: Callable[[], Result]) -> Result:
        """Waits for a turn and calls `work`. A call within a turn of the same thread belongs to that turn.

        Raises `EngineClosed` in a forked process.
        """
        self.check_process()
        if self._thread == threading.get_ident():
            return work()
        with interrupts_deferred():
            with self._changed:
                number, self._n_taken = self._n_taken, self._n_taken + 1
                while number != self._n_ended:
                    self._changed.wait()
                self._thread = threading.get_ident()
            try:
                return work()
            finally:
                with self._changed:
                    self._thread = None
                    self._n_ended += 1
                    self._changed.notify_all()

    def until(self, is_done: Callable[[], bool], step: Callable[[], object]) -> None:
        """Returns when `is_done`. Calls `step` in turns until then, except while other threads do."""
        while not is_done():
            with self._changed:
                while self._n_taken > self._n_ended and not is_done():
                    self._changed.wait()
            self.run(lambda: is_done() or step())
