"""The last live state that a worker has sent, and when it is asked for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from cppbatch.engine.live_state import LiveEngine

_WAIT_S = 0.15
"""For an answer: a worker in a long step answers after it."""


class LatestLive:
    """The last live state of a worker. Used on the event loop.

    One question is on the way at a time. A worker that has had no request since its last answer is not asked: an idle
    engine does nothing for the readers of `/live`.
    """

    def __init__(self) -> None:
        self._engine: LiveEngine | None = None
        self._asked_at = self._received_at = 0.0
        self._answer: asyncio.Future[None] | None = None

    async def get(self, ask: Callable[[], object], idle_seconds: float) -> tuple[LiveEngine | None, float | None]:
        """The state, after an answer if it comes soon, and how old it is in seconds. (None, None) before the first.

        `ask` sends the question. `idle_seconds`: how long there has been no request; 0.0 while there is any.
        """
        if self._engine is None or monotonic() - self._asked_at >= idle_seconds:
            answer = self._answer
            if answer is None:
                answer = self._answer = asyncio.get_running_loop().create_future()
                self._asked_at = monotonic()
                ask()
            await asyncio.wait([answer], timeout=_WAIT_S)
        return self._engine, round(monotonic() - self._received_at, 3) if self._engine else None

    def received(self, engine: LiveEngine) -> None:
        """The worker has answered."""
        self._engine, self._received_at = engine, monotonic()
        self._end_question()

    def reset(self) -> None:
        """The worker has ended: its state is gone, and it does not answer any more."""
        self._engine = None
        self._end_question()

    def _end_question(self) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_result(None)
        self._answer = None
