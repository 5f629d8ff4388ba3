"""How an API family answers: the base of all replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.errors import EngineClosed, GenerationFailed, InvalidRequest
from cppbatch.server.errors import fault_of
from cppbatch.server.families import openai_error

Json = dict[str, Any]


class Frame(NamedTuple):
    """A server-sent event. `data` is sent as JSON; text as it is."""

    data: object
    event: str | None = None


DONE = Frame("[DONE]")
"""The last frame of OpenAI's streams."""


class Tokens(NamedTuple):
    """What a whole answer used."""

    prompt: int
    cached: int
    completion: int


class Reply(ABC):
    """Builds the objects of one answer from its completions' events.

    `n_candidates`: completions of each prompt, which stand one after the other.
    """

    def __init__(self, *, n_candidates: int = 1) -> None:
        self.n_candidates = n_candidates
        self.ends: dict[int, GenerationEvent] = {}
        """The last event of each completion that has ended."""

    def note(self, index: int, event: GenerationEvent) -> None:
        """Remembers how a completion ended. Raises `InvalidRequest`, `GenerationFailed` or `EngineClosed` if it was not
        finished."""
        raise_failure(event)
        if event.finish_reason:
            self.ends[index] = event

    @abstractmethod
    def whole(self, completions: list[list[GenerationEvent]]) -> object:
        """The answer of a request that is not streamed, from all events of each completion."""

    def opening(self) -> list[Frame]:
        """What a stream begins with, as soon as it is known that nothing is wrong with the request."""
        return []

    @abstractmethod
    def frames(self, index: int, event: GenerationEvent) -> list[Frame]:
        """What a stream sends for an event, which has been noted."""

    def ending(self) -> list[Frame]:
        """What a stream ends with, when every completion has."""
        return []

    def failure(self, error: Exception) -> list[Frame]:
        """What a stream ends with, when it cannot go on."""
        return [Frame(openai_error(fault_of(error)))]

    def tokens(self) -> Tokens:
        """Token counts of all completions; those of one prompt count that prompt once, as OpenAI does."""
        prompt = completion = 0
        cached: dict[int, int] = {}  # of each prompt, what no completion had to compute
        for index, event in self.ends.items():
            if usage := event.usage:
                completion += usage.completion_tokens
                prompt += usage.prompt_tokens
                group = index // self.n_candidates
                cached[group] = min(cached.get(group, usage.cached_tokens), usage.cached_tokens)
        return Tokens(prompt // self.n_candidates, sum(cached.values()), completion)


def raise_failure(event: GenerationEvent) -> None:
    """Raises for an event that ends a request without finishing it: `InvalidRequest` if that is the request's own
    doing, else `GenerationFailed` or `EngineClosed`."""
    if event.error_field:
        raise InvalidRequest(event.error_field, event.error or "the text cannot go on")
    if event.finish_reason is FinishReason.ERROR:
        raise GenerationFailed(event.error or "the generation failed")
    if event.finish_reason is FinishReason.CANCELLED:  # not by its client, who would not be listening
        raise EngineClosed("the server is going down")
