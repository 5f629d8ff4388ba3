"""Events on their way out of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Container

from cppbatch.engine.request import GenerationEvent


class Events:
    """The last step's events, and those that came up while somebody waited for other requests."""

    def __init__(self) -> None:
        self.new: list[GenerationEvent] = []
        self._kept: dict[str, list[GenerationEvent]] = {}

    def __bool__(self) -> bool:
        return bool(self.new or self._kept)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def take(self) -> list[GenerationEvent]:
        """All of them, in each request's order."""
        events = [*itertools.chain(*self._kept.values()), *self.new]
        self._kept, self.new = {}, []
        return events

    def take_of(self, request_id: str) -> list[GenerationEvent]:
        """Those of one request."""
        self.keep()
        return self._kept.pop(request_id, [])

    def keep(self) -> None:
        """The new ones wait for those who ask for them."""
        for event in self.new:
            self._kept.setdefault(event.request_id, []).append(event)
        self.new = []

    def ended(self) -> set[str]:
        """Requests whose end is among the new ones."""
        return {event.request_id for event in self.new if event.finish_reason}

    def drop(self, ids: Container[str]) -> None:
        """Forgets those of these requests."""
        self._kept = {request_id: events for request_id, events in self._kept.items() if request_id not in ids}
        self.new = [event for event in self.new if event.request_id not in ids]
