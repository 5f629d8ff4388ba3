"""The answers of `/generate` and `/generate/batch`, whole and streamed."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.api_errors import api_error, openai_error
from cppbatch.server.generate.items import Item
from cppbatch.server.response import DONE, Json, ResponseBuilder, ServerSentEvent
from cppbatch.server.response_logprobs import logprob_entries


class GenerateReply(ResponseBuilder):
    """`/generate`."""

    def build(self, completions: list[list[GenerationEvent]]) -> Json:
        """As in `ResponseBuilder`."""
        return _result(completions[0])

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`: what is new, and with the last of it the rest of the answer."""
        return [ServerSentEvent(_news([event]) | (_end(event) if event.finish_reason else {}))] if _tells(event) else []

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [DONE]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [*super().stream_error(error), DONE]


class BatchReply(ResponseBuilder):
    """`/generate/batch`: an item that fails is told in its place."""

    def __init__(self, items: list[Item]) -> None:
        super().__init__()
        self._items = items
        self._began = perf_counter()
        self._errors: dict[int, Any] = {}  # by item
        self.places: list[int] = []
        """Of each request, which item it is."""

    def refuse(self, item: int, error: Exception) -> None:
        """Notes that an item cannot be had."""
        if isinstance(error, InvalidRequest):
            error = InvalidRequest(self._items[item].name(error.field), error.message)
        self._errors[item] = openai_error(api_error(error)).error

    def record(self, index: int, event: GenerationEvent) -> None:
        """As in `ResponseBuilder`, but what is wrong is the item's own affair."""
        try:
            super().record(index, event)
        except Exception as error:
            self.refuse(self.places[index], error)

    def build(self, completions: list[list[GenerationEvent]]) -> Json:
        """As in `ResponseBuilder`."""
        results: list[Json] = [{"index": i, "error": self._errors.get(i)} for i in range(len(self._items))]
        for i, events in zip(self.places, completions, strict=True):
            if i not in self._errors:
                results[i] = {"index": i, **_result(events)}
        return {"results": results, **self._totals()}

    def stream_start(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`: the items that were refused before anything ran."""
        return [
            ServerSentEvent({"index": i, "error": error}) for i, error in self._errors.items() if i not in self.places
        ]

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        i = self.places[index]
        if i in self._errors:
            return [ServerSentEvent({"index": i, "error": self._errors[i]})]
        news = {"index": i, **_news([event])}
        return [ServerSentEvent(news | (_end(event) if event.finish_reason else {}))] if _tells(event) else []

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [ServerSentEvent(self._totals()), DONE]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [*super().stream_error(error), DONE]

    def _totals(self) -> Json:
        seconds, n = perf_counter() - self._began, len(self._items)
        tokens = self.token_counts()
        return {
            "total_prompts": n,
            "failed": len(self._errors),
            "prompt_tokens": tokens.prompt,
            "completion_tokens": tokens.completion,
            "cached_tokens": tokens.cached,
            "total_time_seconds": seconds,
            "avg_time_per_prompt": seconds / n,
            "tokens_per_second": tokens.completion / seconds,
        }


def _tells(event: GenerationEvent) -> bool:
    return bool(event.text or event.tokens or event.logprobs or event.finish_reason)


def _result(events: list[GenerationEvent]) -> Json:
    """A whole text and how it came about."""
    return _news(events) | _end(events[-1])


def _news(events: list[GenerationEvent]) -> Json:
    news: Json = {
        "text": "".join(event.text for event in events),
        "tokens": [token for event in events for token in event.tokens],
    }
    if logprobs := [entry for event in events for entry in event.logprobs]:
        news["logprobs"] = logprob_entries(logprobs)
    return news


def _end(last: GenerationEvent) -> Json:
    assert last.finish_reason
    assert last.usage
    return {
        "finish_reason": last.finish_reason.value,
        "prompt_tokens": last.usage.prompt_tokens,
        "completion_tokens": last.usage.completion_tokens,
        "cached_tokens": last.usage.cached_tokens,
        "seed": last.seed,
        "timings": {
            "queue_seconds": last.usage.queue_seconds,
            "time_to_first_token_seconds": last.usage.first_token_seconds,
            "total_seconds": last.usage.total_seconds,
        },
    }
