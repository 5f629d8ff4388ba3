"""Time controlled by tests: a clock, and an asyncio event loop with a clock that jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Clock:
    """Seconds that advance under the test's control, and by `tick` with each call. Replaces a function, or `time`."""

    def __init__(self, now: float = 0.0, *, tick: float = 0.0) -> None:
        self.now, self._tick = now, tick

    def __call__(self) -> float:
        self.now += self._tick
        return self.now

    monotonic = __call__

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Selector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits, and no timer would wake one: a deadlock"
        self.now += max(0.0, timeout)
        return super().select(0)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, but waiting takes no time: hours take a moment. Fails where all tasks wait for each other."""
    loop = _VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
