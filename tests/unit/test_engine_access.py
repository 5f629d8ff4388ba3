"""Ctrl-C while a thread waits for its turn at an engine leaves the engine to the other threads."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

import pytest

from cppbatch import GenerationRequest, SamplingParams
from cppbatch.engine.access import EngineAccess, OwnProcess
from tests.support.fakes import fake_engine


class InterruptedLock:
    """A lock during whose acquisition Ctrl-C is pressed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.n_left = 1

    def __enter__(self) -> bool:
        self.lock.acquire()
        if self.n_left:
            self.n_left = 0
            os.kill(os.getpid(), signal.SIGINT)
        return True

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def acquire(self, *args: bool) -> bool:
        return self.lock.acquire(*args)

    def release(self) -> None:
        self.lock.release()


@pytest.mark.skipif(os.name == "nt", reason="a process cannot send itself Ctrl-C on Windows")
def test_ctrl_c_while_the_lock_is_acquired_does_not_keep_it() -> None:
    access, interrupted = EngineAccess(OwnProcess()), InterruptedLock()
    access._changed = threading.Condition(interrupted)  # type: ignore[arg-type]
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        access.until(lambda: False, lambda: done.append(1))
    assert not interrupted.lock.locked()
    assert access.run(lambda: "next") == "next"


def test_requests_are_prepared_without_a_lock_that_ctrl_c_could_leave_held() -> None:
    """`Condition.__enter__` is Python code: Ctrl-C between its acquisition and the block keeps the lock for ever."""
    engine, entered = fake_engine(), []

    def trace(frame: FrameType, *_: object) -> None:
        if frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "__enter__":
            entered.append(frame.f_back)

    sys.settrace(trace)
    try:
        engine.core.make_sequence(GenerationRequest(id="", prompt=[1, 2], params=SamplingParams(max_tokens=1)))
    finally:
        sys.settrace(None)
    assert entered == []
