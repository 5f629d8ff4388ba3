"""One stream's events on the way to its reader."""

from __future__ import annotations

import asyncio

import msgspec

from cppbatch.engine.request import GenerationEvent, TokenLogprob


class OutputCollector:
    """Holds what the reader has not fetched yet, merged into one event: a slow reader costs its text, not its events.

    Used on the event loop only.
    """

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._last: GenerationEvent | None = None
        self._error: Exception | None = None
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def put(self, event: GenerationEvent) -> None:
        """Adds an event. The one with a finish reason is the last."""
        if self._last is not None:
            if not self._text:  # the first time that it waits for its reader
                self._keep(self._last)
            self._keep(event)
        self._last = event
        self._ready.set()

    def _keep(self, event: GenerationEvent) -> None:
        self._text.append(event.text)
        self._tokens.extend(event.tokens)
        self._logprobs.extend(event.logprobs)

    def fail(self, error: Exception) -> None:
        """Ends the stream: `get` raises this instead of what it still had."""
        self._error = error
        self._ready.set()

    async def get(self) -> GenerationEvent:
        """Everything that is new. Raises what `fail` was given."""
        await self._ready.wait()
        if self._error:
            raise self._error
        assert self._last is not None
        event, self._last = self._last, None
        self._ready.clear()
        if self._text:
            event = msgspec.structs.replace(
                event, text="".join(self._text), tokens=self._tokens, logprobs=self._logprobs
            )
            self._text, self._tokens, self._logprobs = [], [], []
        return event
