"""Access of several threads to one engine: one of them steps while the others wait for their events."""

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
    """Whether this thread has access or waits for it."""

    value = False


class OwnProcess:
    """The process that loaded an engine."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_fork(self) -> bool:
        """Whether the current process is a fork of it."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises `EngineClosed` in a forked process: llama.cpp's compute threads do not exist there."""
        if self.is_fork:
            raise EngineClosed(
                f"the engine was loaded in process {self._pid}, but this is its fork, process {os.getpid()}, which "
                "lacks llama.cpp's compute threads: load the engine after the fork, or run `cppbatch serve` and send "
                "requests to it"
            )


class EngineAccess:
    """The order in which threads use an engine: first come, first served, one at a time.

    An access is a step, or work between two steps (add, cancel ...). So a thread that adds a request waits at most for
    the running step. No lock is held during an access. Ctrl-C takes effect at its end, so it never interrupts a step.

    An `EngineCore` with its own thread (`LocalEngine`, a worker) does not need this.
    """

    def __init__(self, process: OwnProcess) -> None:
        self._process = process
        self._changed = threading.Condition(threading.Lock())  # notified at the end of each access
        self._n_taken = self._n_ended = 0  # accesses
        self._thread: int | None = None  # the thread that has access
        self._inside = _Inside()
        self._later: deque[Callable[[], object]] = deque()  # calls for the end of an access

    def run(self, work: Callable[[], Result]) -> Result:
        """Waits for access and calls `work`. A call within an access of the same thread belongs to it.

        Raises `EngineClosed` in a forked process.
        """
        self._process.check()
        if self._thread == threading.get_ident():
            return work()
        try:
            with interrupts_deferred(), self._mark_inside():
                return self._take(work)
        finally:
            if self._later:  # since the end of the access
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
        """Calls `work` with access; if this thread has it or waits for it, at the end of that access.

        For calls by garbage collection in the middle of a step: closing an unreferenced iterator.
        """
        if self._inside.value:
            self._later.append(work)
        else:
            self.run(work)

    def check_outside(self) -> None:
        """Raises `RuntimeError` within an access of this thread, which would wait for itself."""
        if self._thread == threading.get_ident():
            raise RuntimeError(
                "the engine is computing a step on this thread: a logits processor, stopping criterion or other "
                "callback cannot use or close the same engine"
            )

    @contextmanager
    def _mark_inside(self) -> Iterator[None]:
        self._inside.value = True
        try:
            yield
        finally:
            self._inside.value = False

    def until(self, is_done: Callable[[], bool], step: Callable[[], object]) -> None:
        """Returns once `is_done`. Until then, calls `step` with access, except while other threads do.

        Ctrl-C takes effect at the end of their access: raised while the condition's lock is acquired, it would leave
        the lock held.
        """
        while not is_done():
            with interrupts_deferred() as is_pressed, self._mark_inside(), self._changed:
                while self._n_taken > self._n_ended and not is_done() and not is_pressed():
                    self._changed.wait()
            self.run(lambda: is_done() or step())
