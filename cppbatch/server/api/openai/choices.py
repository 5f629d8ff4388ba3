"""Shared by the responses of completions and chat completions: choices, best of several candidates, usage."""

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
)
from cppbatch.server.answer.response import Json, ResponseBuilder, media_details
from cppbatch.server.fields.sampling import TimingFields
from cppbatch.server.http.event_stream import DONE, ServerSentEvent
from cppbatch.server.models.serving import ResolvedRequest, Serving

if TYPE_CHECKING:
    from typing_extensions import Unpack


log = logging.getLogger("cppbatch.server")


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    image_tokens: int | UnsetType = UNSET
    """Prompt tokens of images; absent if there are none."""
    audio_tokens: int | UnsetType = UNSET
    """Prompt tokens of audio; absent if there are none."""


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: int
    """Reasoning tokens of the returned completions; estimated where a step has both reasoning and text."""
    accepted_prediction_tokens: int
    """Completion tokens that are accepted draft tokens."""
    rejected_prediction_tokens: int
    """Draft tokens that were verified and rejected. They are not completion tokens."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of the request. A prompt is counted once, regardless of the number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class VerboseFields(TimingFields, kw_only=True):
    """Fields of APIs that can return llama-server's description of a completion."""

    verbose: bool | None = None
    """Add `__verbose`: the response of llama-server's `/completion`, with the prompt and the sampling settings."""


class Extras(TypedDict, total=False):
    """Fields of a chunk that OpenAI's API does not have, and `usage`."""

    usage: Usage
    timings: Timings | UnsetType
    prompt_progress: PromptProgress | UnsetType
    verbose: LlamaResponse | LlamaChunk | UnsetType


async def verbose_results(
    body: VerboseFields, requests: list[GenerationRequest], serving: Serving
) -> LlamaResults | None:
    """The builder of `__verbose`; None if neither the request nor the server (--verbose) enables it."""
    if not (log.isEnabledFor(logging.DEBUG) if body.verbose is None else body.verbose):
        return None
    prompts = [request.prompt for request in requests[:: body.n_candidates]]
    tokens = []
    for prompt in prompts:
        if not isinstance(prompt, Pair):  # one that is too long has no response
            is_long = isinstance(prompt, str) and len(prompt) > serving.max_length
            tokens.append([] if is_long else await serving.client.tokenize(prompt))
    return LlamaResults(body, requests, tokens, serving)


class ChoicesBuilder(ResponseBuilder):
    """Returns the `n_choices` of `n_candidates` completions per prompt with the highest mean log-probability."""

    stream_tail = (DONE,)

    def __init__(self, body: TimingFields, serving: Serving, resolved: ResolvedRequest) -> None:
        super().__init__(resolved, stream=body.stream, n_candidates=body.n_candidates)
        self.head: Json = {
            "id": resolved.id,
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": serving.fingerprint,
        }
        """The fields of the response and of all chunks."""
        self._n_choices = body.n_choices
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

        self.stream_timings = StreamTimings(body)
        self.verbose: LlamaResults | None = None
        """Builds `__verbose`; None: it is omitted."""

    def record(self, index: int, event: GenerationEvent) -> None:
        """Records the event, also for `__verbose`."""
        super().record(index, event)
        if self.verbose:
            self.verbose.record(index, event)

    @abstractmethod
    def chunk(self, choices: list[Any], **extras: Unpack[Extras]) -> ServerSentEvent:
        """An event of the stream, with these choices and further fields."""

    @abstractmethod
    def empty_choice(self, index: int) -> Any:
        """A choice of a chunk that adds nothing."""

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens so far; 0 if the text is not parsed."""
        return 0

    def chunk_fields(self, extras: Extras) -> dict[str, Any]:
        """The fields of a chunk, except its choices."""
        return {**self.head, **extras}

    def progress_chunks(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """With `return_progress`, an event with the progress of the prompt."""
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
        """The fields of a response, except its choices. Times and `__verbose` are those of the first completion."""
        return {
            **self.head,
            "usage": self.usage(),
            "timings": self.timings(),
            "verbose": self.verbose.response(0, self.last_events[0], completions[0]) if self.verbose else UNSET,
        }

    def stream_end(self) -> list[ServerSentEvent]:
        """With `include_usage`, a chunk with the usage and no choices."""
        return [self.chunk([], usage=self.usage(), timings=self.timings())] if self._include_usage else []

    def usage(self) -> Usage:
        """The usage of all completions, including those not returned."""
        counts = self.token_counts()
        return Usage(
            prompt_tokens=counts.prompt,
            completion_tokens=counts.completion,
            total_tokens=counts.prompt + counts.completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached, **media_details(counts)),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=self.reasoning_tokens,
                accepted_prediction_tokens=counts.accepted,
                rejected_prediction_tokens=counts.drafted - counts.accepted,
            ),
        )

    def seed(self, index: int) -> int:
        """The seed of a finished completion."""
        seed = self.last_events[index].seed
        assert seed is not None
        return seed

    def select_choices(self, logprobs: list[list[TokenLogprob]]) -> list[int]:
        """The indices of the completions returned as choices, in order. `logprobs`: of each completion."""
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
