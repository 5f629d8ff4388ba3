"""What the responses of completions and chat completions share: choices, the best of several candidates, usage."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

import msgspec

from cppbatch.engine.best_of import mean_logprob
from cppbatch.engine.request import GenerationEvent, TokenLogprob
from cppbatch.server.response import DONE, Json, ResponseBuilder, ServerSentEvent
from cppbatch.server.sampling_fields import SamplingFields
from cppbatch.server.serving import Serving, new_id


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.completion_tokens_details`."""

    accepted_prediction_tokens: int
    """Completion tokens that were accepted draft tokens."""
    rejected_prediction_tokens: int
    """Draft tokens that were computed and not accepted. They are no completion tokens."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the whole request. A prompt counts once, whatever the number of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChoicesBuilder(ResponseBuilder):
    """Shows the `n_choices` completions of each prompt with the highest mean log-probability, of `n_candidates`."""

    def __init__(self, body: SamplingFields, serving: Serving, *, id_prefix: str) -> None:
        super().__init__(n_candidates=body.n_candidates)
        self.id = new_id(id_prefix)
        self.head: Json = {
            "id": self.id,
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": serving.fingerprint,
        }
        """The fields that the response and all chunks have."""
        self._n_choices = body.n_choices
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

    @abstractmethod
    def chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType = msgspec.UNSET) -> ServerSentEvent:
        """An event of the stream, with these choices."""

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`. With `include_usage`, a chunk with the usage and no choices comes before the end."""
        usage = [self.chunk([], self.usage())] if self._include_usage else []
        return [*usage, DONE]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [*super().stream_error(error), DONE]

    def usage(self) -> Usage:
        """The usage of all completions, including those that are not shown."""
        counts = self.token_counts()
        return Usage(
            prompt_tokens=counts.prompt,
            completion_tokens=counts.completion,
            total_tokens=counts.prompt + counts.completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=counts.accepted,
                rejected_prediction_tokens=counts.drafted - counts.accepted,
            ),
        )

    def seed(self, index: int) -> int:
        """The seed of a completion that has ended."""
        seed = self.last_events[index].seed
        assert seed is not None
        return seed

    def shown(self, logprobs: list[list[TokenLogprob]]) -> list[int]:
        """The indices of the completions that are choices, in their order. `logprobs`: of each completion."""
        if self._n_choices == self.n_candidates:
            return list(range(len(logprobs)))

        def badness(i: int) -> float:
            usage = self.last_events[i].usage
            return -mean_logprob(logprobs[i], usage.completion_tokens if usage else 0)

        prompts = [range(first, first + self.n_candidates) for first in range(0, len(logprobs), self.n_candidates)]
        return [i for candidates in prompts for i in sorted(candidates, key=badness)[: self._n_choices]]


def logprobs_of(events: list[GenerationEvent]) -> list[TokenLogprob]:
    """The log-probabilities of all events of a completion."""
    return [entry for event in events for entry in event.logprobs]
