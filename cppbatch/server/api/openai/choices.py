"""What the responses of completions and chat completions share: choices, the best of several candidates, usage."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import GenerationEvent, GenerationRequest, Pair, TokenLogprob, mean_logprob
from cppbatch.server.answer.llama_result import (
    LlamaChunk,
    LlamaResponse,
    LlamaResults,
    PromptProgress,
    StreamTimings,
    Timings,
    timings,
)
from cppbatch.server.answer.response import DONE, Json, ResponseBuilder, ServerSentEvent, shown_media
from cppbatch.server.fields.sampling import TimingFields
from cppbatch.server.models.serving import Serving

if TYPE_CHECKING:
    from typing_extensions import Unpack


log = logging.getLogger("cppbatch.server")


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    image_tokens: int | UnsetType = UNSET
    """Prompt tokens that are pictures; absent if none is."""
    audio_tokens: int | UnsetType = UNSET
    """Prompt tokens that are sound; absent if none is."""


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: int
    """Completion tokens of reasoning, of the completions that are shown; estimated where a step has both."""
    accepted_prediction_tokens: int
    """Completion tokens that were accepted draft tokens."""
    rejected_prediction_tokens: int
    """Draft tokens that were computed and not accepted. They are no completion tokens."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of the request. A prompt is counted once, regardless of the number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class VerboseFields(TimingFields, kw_only=True):
    """Fields of APIs that can show llama-server's description of a completion."""

    verbose: bool | None = None
    """Add `__verbose`: what llama-server's `/completion` answers, with the prompt and the sampling settings."""


class Extras(TypedDict, total=False):
    """Fields of a chunk that OpenAI's API does not have, except `usage`."""

    usage: Usage | None
    timings: Timings | UnsetType
    prompt_progress: PromptProgress | UnsetType
    verbose: LlamaResponse | LlamaChunk | UnsetType


async def verbose_results(
    body: VerboseFields, requests: list[GenerationRequest], serving: Serving
) -> LlamaResults | None:
    """What makes `__verbose`; None if neither the request nor, with --verbose, the server asks for it."""
    if not (log.isEnabledFor(logging.DEBUG) if body.verbose is None else body.verbose):
        return None
    prompts = [request.prompt for request in requests[:: body.n_candidates]]
    tokens = [await serving.client.tokenize(prompt) for prompt in prompts if not isinstance(prompt, Pair)]
    return LlamaResults(body, requests, tokens, serving)


class ChoicesBuilder(ResponseBuilder):
    """Shows the `n_choices` completions of each prompt with the highest mean log-probability, of `n_candidates`."""

    def __init__(self, body: TimingFields, serving: Serving, response_id: str) -> None:
        super().__init__(n_candidates=body.n_candidates)
        self.head: Json = {
            "id": response_id,
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": serving.fingerprint,
        }
        """The fields that the response and all chunks have."""
        self._n_choices = body.n_choices
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

        self.stream_timings = StreamTimings(body)
        self.verbose: LlamaResults | None = None
        """Makes `__verbose`; None: it is not shown."""

    def record(self, index: int, event: GenerationEvent) -> None:
        """As in `ResponseBuilder`."""
        super().record(index, event)
        if self.verbose:
            self.verbose.record(index, event)

    @abstractmethod
    def chunk(self, choices: list[Any], **extras: Unpack[Extras]) -> ServerSentEvent:
        """An event of the stream, with these choices and the fields that it has beside them."""

    @abstractmethod
    def empty_choice(self, index: int) -> Any:
        """A choice of a chunk that adds nothing."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far; 0 where text is not parsed."""
        return 0

    def chunk_fields(self, extras: Extras) -> dict[str, Any]:
        """The fields of a chunk beside its choices."""
        no_usage = {"usage": None} if self._include_usage else {}  # as in OpenAI's API, until the last chunk
        return {**self.head, **no_usage, **extras}

    def progress_chunks(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """With `return_progress`, an event that shows how much of the prompt is processed."""
        progress = self.stream_timings.progress(index, event)
        if progress is UNSET:
            return []
        per_token = self.stream_timings.per_token(event)
        return [self.chunk([self.empty_choice(index)], timings=per_token, prompt_progress=progress)]

    def token_fields(self, index: int, event: GenerationEvent) -> Extras:
        """The fields of a chunk with the text of an event."""
        extras: Extras = {"timings": self.stream_timings.per_token(event)}
        if self.verbose:
            extras["verbose"] = self.verbose.chunk(index, event, timings=extras["timings"])
        return extras

    def end_fields(self, index: int) -> Extras:
        """The fields of the chunk with the finish reason."""
        extras: Extras = {"timings": self.timings(index)}
        if self.verbose:
            extras["verbose"] = self.verbose.response(index, self.last_events[index], ())
        return extras

    def result_fields(self, completions: list[list[GenerationEvent]]) -> dict[str, Any]:
        """The fields of a response beside its choices. Times, and `__verbose`, are those of the first completion."""
        return {
            **self.head,
            "usage": self.usage(),
            "timings": self.timings(0),
            "verbose": self.verbose.response(0, self.last_events[0], completions[0]) if self.verbose else UNSET,
        }

    def timings(self, index: int) -> Timings | UnsetType:
        """The times of a completion that has ended."""
        usage = self.last_events[index].usage
        return timings(usage) if usage else UNSET

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`. With `include_usage`, a chunk with the usage and no choices comes before the end."""
        usage = [self.chunk([], usage=self.usage(), timings=self.timings(0))] if self._include_usage else []
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
            prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached, **shown_media(counts)),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=self.reasoning_tokens,
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
