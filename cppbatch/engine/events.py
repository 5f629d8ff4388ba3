"""News on their way out of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Container
from time import perf_counter

from cppbatch.engine.metrics import Metrics
from cppbatch.engine.request import GenerationEvent
from cppbatch.engine.sequence import News
from cppbatch.engine.teller import Teller


class Events:
    """The last step's news, and the events that came up while somebody waited for other requests."""

    def __init__(self, teller: Teller, metrics: Metrics) -> None:
        self._teller, self._metrics = teller, metrics
        self.new: list[News] = []
        self._kept: dict[str, list[GenerationEvent]] = {}
        self.reserved: set[str] = set()
        """Requests whose events are for `take_of` alone, whoever steps."""

    def __bool__(self) -> bool:
        """Whether `take` has any to give."""
        ids = itertools.chain(self._kept, (news.sequence.id for news in self.new))
        return any(request_id not in self.reserved for request_id in ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def _tell(self) -> list[GenerationEvent]:
        """The new ones as events; they stay here."""
        if not self.new:
            return []
        began = perf_counter()
        events = [self._teller.event(news) for news in self.new]
        made = perf_counter()
        self._metrics.told(began, made, made)
        return events

    def take(self) -> list[GenerationEvent]:
        """All that are not reserved, in each request's order."""
        if self.reserved:
            self.keep()
        kept, self._kept = self._kept, {}
        for request_id in self.reserved & kept.keys():
            self._kept[request_id] = kept.pop(request_id)
        events = [*itertools.chain(*kept.values()), *self._tell()]
        self.new = []
        return events

    def take_news(self) -> list[News]:
        """The last step's, for somebody else to tell."""
        news, self.new = self.new, []
        return news

    def take_of(self, request_id: str) -> list[GenerationEvent]:
        """Those of one request."""
        self.keep()
        return self._kept.pop(request_id, [])

    def keep(self) -> None:
        """The new ones wait for those who ask for them."""
        for event in self._tell():
            self._kept.setdefault(event.request_id, []).append(event)
        self.new = []

    def ended(self) -> set[str]:
        """Requests whose end is among the new ones."""
        return {news.sequence.id for news in self.new if news.end}

    def drop(self, ids: Container[str]) -> None:
        """Forgets those of these requests."""
        self._kept = {request_id: events for request_id, events in self._kept.items() if request_id not in ids}
        self.new = [news for news in self.new if news.sequence.id not in ids]
