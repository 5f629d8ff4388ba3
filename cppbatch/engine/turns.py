"""Several threads on one engine: they take turns, so that one of them steps while the others wait for their events."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from cppbatch.errors import EngineClosed
from cppbatch.interrupts import interrupts_deferred

Result = TypeVar("Result")


class _Inside(threading.local):
    """Whether this thread takes a turn, or waits for one."""

    value = False


class OwnProcess:
    """The process that loaded an engine."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of it."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises `EngineClosed` in a forked process: llama.cpp's compute threads do not exist there."""
        if self.is_fork:
            raise EngineClosed(
                f"the engine was loaded in process {self._pid}, but this is its fork, process {os.getpid()}, which "
                "lacks llama.cpp's compute threads: load the engine after the fork, or run `cppbatch serve` and send "
                "requests to it"
            )


class Turns:
    """The order in which threads use an engine: first come, first served, one at a time.

    A turn is a step, or work between two steps (add, cancel ...). So a thread that adds a request waits for at most the
    step that runs. During a turn no lock is held. Ctrl-C in a turn takes effect at its end, so it interrupts no step.

    An `EngineCore` that has a thread of its own (`LocalEngine`, a worker) needs no turns.
    """

    def __init__(self, process: OwnProcess) -> None:
        self._process = process
        self._changed = threading.Condition(threading.Lock())  # notified at the end of each turn
        self._n_taken = self._n_ended = 0  # turns
        self._thread: int | None = None  # whose turn it is
        self._inside = _Inside()
        self._later: deque[Callable[[], object]] = deque()  # for the end of a turn

    def run(self, work: Callable[[], Result]) -> Result:
        """Waits for a turn and calls `work`. A call within a turn of the same thread belongs to that turn.

        Raises `EngineClosed` in a forked process.
        """
        self._process.check()
        if self._thread == threading.get_ident():
            return work()
        try:
            with interrupts_deferred(), self._marked():
                return self._take(work)
        finally:
            if self._later:  # since the end of the turn
                self.run(lambda: None)

    def _take(self, work: Callable[[], Result]) -> Result:
        with self._changed:
            number, self._n_taken = self._n_taken, self._n_taken + 1
            while number != self._n_ended:
                self._changed.wait()
            self._thread = threading.get_ident()
        try:
            return work()
        finally:
            while self._later:
                self._later.popleft()()
            with self._changed:
                self._thread = None
                self._n_ended += 1
                self._changed.notify_all()

    def soon(self, work: Callable[[], object]) -> None:
        """As `run`; within a turn of the same thread, or its wait for one, `work` is called at the end of the turn.

        For what garbage collection may call in the middle of a step: closing an iterator without references.
        """
        if self._inside.value:
            self._later.append(work)
        else:
            self.run(work)

    def check_outside(self) -> None:
        """Raises `RuntimeError` within a turn of this thread: it would wait for its own end."""
        if self._thread == threading.get_ident():
            raise RuntimeError(
                "the engine is computing a step on this thread: a logits processor, stopping criterion or other "
                "callback cannot use or close the same engine"
            )

    @contextmanager
    def _marked(self) -> Iterator[None]:
        self._inside.value = True
        try:
            yield
        finally:
            self._inside.value = False

    def until(self, is_done: Callable[[], bool], step: Callable[[], object]) -> None:
        """Returns when `is_done`. Calls `step` in turns until then, except while other threads do."""
        while not is_done():
            with self._marked(), self._changed:
                while self._n_taken > self._n_ended and not is_done():
                    self._changed.wait()
            self.run(lambda: is_done() or step())
