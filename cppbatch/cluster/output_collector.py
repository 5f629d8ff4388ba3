"""The events of one request on their way to its reader."""

from __future__ import annotations

import asyncio

import msgspec

from cppbatch.engine.request import GenerationEvent, TokenLogprob


class OutputCollector:
    """Merges unread events into one: a slow reader costs memory for its text, not for its events.

    The engine numbers requests by itself; the collector puts the client's `request_id` into the events. Used on the
    event loop only.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._ready = asyncio.Event()
        self._last: GenerationEvent | None = None
        self._error: Exception | None = None
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.finished = False
        """Whether `get` has returned the last event."""

    def put(self, event: GenerationEvent) -> None:
        """Adds an event. The event with a finish reason is the last."""
        if self._last is not None:
            if not self._text:  # the second unread event
                self._keep(self._last)
            self._keep(event)
        self._last = event
        self._ready.set()

    def _keep(self, event: GenerationEvent) -> None:
        self._text.append(event.text)
        self._tokens.extend(event.tokens)
        self._logprobs.extend(event.logprobs)

    def fail(self, error: Exception) -> None:
        """Ends the stream: the next `get` raises this error and drops unread events."""
        self._error = error
        self._ready.set()

    async def get(self) -> GenerationEvent:
        """Waits for an event and returns all unread ones merged. Raises the error given to `fail`."""
        await self._ready.wait()
        if self._error:
            raise self._error
        assert self._last is not None
        event, self._last = self._last, None
        self._ready.clear()
        self.finished = event.finish_reason is not None
        if self._text:
            event = msgspec.structs.replace(
                event,
                request_id=self._request_id,
                text="".join(self._text),
                tokens=self._tokens,
                logprobs=self._logprobs,
            )
            self._text, self._tokens, self._logprobs = [], [], []
        elif event.request_id != self._request_id:
            event = msgspec.structs.replace(event, request_id=self._request_id)
        return event
