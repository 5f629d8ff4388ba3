"""The unread events of a request, merged into one."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from cppbatch.engine.request import GenerationEvent, RequestUsage, TokenLogprob


class OutputCollector:
    """Merges the unread events of a request into one, so that a slow reader costs memory for text, not for events.
    Events without tokens, which report prefill progress, are few and not merged.

    Events arrive with the engine's id (`InFlightRequest.id`), which the collector, their only reader, replaces by the
    client's. Only used on the event loop.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._ready = asyncio.Event()
        self._reports: deque[GenerationEvent] = deque()
        self._last: GenerationEvent | None = None
        self._error: Exception | None = None
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._token_texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._usage: RequestUsage | None = None
        self.finished = False
        """Whether `get` has returned the last event."""

    def put(self, event: GenerationEvent) -> None:
        """Adds an event. The event with a finish reason is the last."""
        msgspec.structs.force_setattr(event, "request_id", self._request_id)
        if event.is_report:
            self._reports.append(event)
            self._ready.set()
            return
        if self._last is not None:
            if not self._text:  # the second unread event
                self._keep(self._last)
            self._keep(event)
        self._last = event
        self._ready.set()

    def _keep(self, event: GenerationEvent) -> None:
        self._text.append(event.text)
        self._tokens.extend(event.tokens)
        self._token_texts.extend(event.token_texts)
        self._logprobs.extend(event.logprobs)
        self._usage = event.usage or self._usage

    def fail(self, error: Exception) -> None:
        """Ends the stream: the next `get` raises this error and drops unread events."""
        self._error = error
        self._ready.set()

    async def get(self) -> GenerationEvent:
        """Waits for an event and returns all unread ones merged, preceded by prefill reports. Raises the error passed
        to `fail`."""
        await self._ready.wait()
        if self._error:
            raise self._error
        if self._reports:
            report = self._reports.popleft()
            if not self._reports and self._last is None:
                self._ready.clear()
            return report
        assert self._last is not None
        event, self._last = self._last, None
        self._ready.clear()
        self.finished = event.finish_reason is not None
        if self._text:
            event = msgspec.structs.replace(
                event,
                text="".join(self._text),
                tokens=self._tokens,
                token_texts=self._token_texts,
                logprobs=self._logprobs,
                usage=self._usage,
            )
            self._text, self._tokens, self._token_texts, self._logprobs = [], [], [], []
            self._usage = None
        return event
