"""The last state that an engine elsewhere has reported, and when to ask for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

State = TypeVar("State")

_WAIT_S = 0.15
"""Timeout for an answer, since a worker in a long step answers after it."""


class LatestState(Generic[State]):
    """The last state reported by an engine on another thread or in another process. Used on the event loop.

    Only one question is pending at a time. An engine without requests since its last answer is not asked: an idle
    engine does no work for readers of `/live`.
    """

    def __init__(self, timeout: float = _WAIT_S) -> None:
        """`timeout`: seconds to wait for an answer."""
        self._timeout = timeout
        self.last: State | None = None
        """None before the first report, and after `reset`."""
        self._asked_at = self._received_at = 0.0
        self._answer: asyncio.Future[None] | None = None

    async def get(self, ask: Callable[[], object], idle_seconds: float = 0.0) -> tuple[State | None, float | None]:
        """The state, updated if an answer arrives soon, and its age in seconds. (None, None) before the first.

        `ask` sends the question. `idle_seconds`: seconds without requests; 0.0 while there are any.
        """
        if self.last is None or monotonic() - self._asked_at >= idle_seconds:
            answer = self._answer
            if answer is None:
                answer = self._answer = asyncio.get_running_loop().create_future()
                self._asked_at = monotonic()
                ask()
            await asyncio.wait([answer], timeout=self._timeout)  # wait_for may swallow a cancellation
        return self.last, None if self.last is None else round(monotonic() - self._received_at, 3)

    def received(self, state: State) -> None:
        """The engine has answered."""
        self.last, self._received_at = state, monotonic()
        self.stop_waiting()

    def reset(self) -> None:
        """Called when the engine has ended: its state is lost, and it will not answer."""
        self.last = None
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Called when the engine will not answer; its last state is kept."""
        if self._answer and not self._answer.done():
            self._answer.set_result(None)
        self._answer = None
