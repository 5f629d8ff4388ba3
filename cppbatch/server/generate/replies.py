"""The answers of `/generate` and `/generate/batch`, whole and streamed."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.errors import fault_of
from cppbatch.server.families import openai_error
from cppbatch.server.generate.items import Item
from cppbatch.server.reply import DONE, Frame, Json, Reply
from cppbatch.server.token_logprobs import token_logprobs


class GenerateReply(Reply):
    """`/generate`."""

    def whole(self, completions: list[list[GenerationEvent]]) -> Json:
        """As in `Reply`."""
        return _result(completions[0])

    def frames(self, index: int, event: GenerationEvent) -> list[Frame]:
        """As in `Reply`: what is new, and with the last of it the rest of the answer."""
        return [Frame(_news([event]) | (_end(event) if event.finish_reason else {}))] if _tells(event) else []

    def ending(self) -> list[Frame]:
        """As in `Reply`."""
        return [DONE]

    def failure(self, error: Exception) -> list[Frame]:
        """As in `Reply`."""
        return [*super().failure(error), DONE]


class BatchReply(Reply):
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
        self._errors[item] = openai_error(fault_of(error))["error"]

    def note(self, index: int, event: GenerationEvent) -> None:
        """As in `Reply`, but what is wrong is the item's own affair."""
        try:
            super().note(index, event)
        except Exception as error:
            self.refuse(self.places[index], error)

    def whole(self, completions: list[list[GenerationEvent]]) -> Json:
        """As in `Reply`."""
        results: list[Json] = [{"index": i, "error": self._errors.get(i)} for i in range(len(self._items))]
        for i, events in zip(self.places, completions, strict=True):
            if i not in self._errors:
                results[i] = {"index": i, **_result(events)}
        return {"results": results, **self._totals()}

    def opening(self) -> list[Frame]:
        """As in `Reply`: the items that were refused before anything ran."""
        return [Frame({"index": i, "error": error}) for i, error in self._errors.items() if i not in self.places]

    def frames(self, index: int, event: GenerationEvent) -> list[Frame]:
        """As in `Reply`."""
        i = self.places[index]
        if i in self._errors:
            return [Frame({"index": i, "error": self._errors[i]})]
        news = {"index": i, **_news([event])}
        return [Frame(news | (_end(event) if event.finish_reason else {}))] if _tells(event) else []

    def ending(self) -> list[Frame]:
        """As in `Reply`."""
        return [Frame(self._totals()), DONE]

    def failure(self, error: Exception) -> list[Frame]:
        """As in `Reply`."""
        return [*super().failure(error), DONE]

    def _totals(self) -> Json:
        seconds, n = perf_counter() - self._began, len(self._items)
        tokens = self.tokens()
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
        news["logprobs"] = token_logprobs(logprobs)
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
