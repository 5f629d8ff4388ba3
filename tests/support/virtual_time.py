"""An asyncio event loop whose clock jumps to the next timer: a test of hours of waiting takes milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


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
    """As `asyncio.run`, but waiting takes no time. Fails where all tasks wait for each other."""
    loop = _VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
