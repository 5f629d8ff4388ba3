"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import FinishReason, GenerationEvent, TokenLogprob
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.llama_result import LlamaChunk, LlamaResponse, PromptProgress, Timings
from cppbatch.server.answer.logprobs import CompletionLogprobs, completion_logprobs
from cppbatch.server.answer.response import generation
from cppbatch.server.api.openai.choices import (
    ChoicesBuilder,
    Extras,
    Usage,
    VerboseFields,
    logprobs_of,
    verbose_results,
)
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.serving import Prompt, ResolvedRequest, Serving, new_id

if TYPE_CHECKING:
    from typing_extensions import Unpack


routes = Routes()


class CompletionRequest(VerboseFields, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    """Return log-probabilities of the generated tokens, and of up to 20 most likely tokens at each position."""
    suffix: str | None = None
    """The text after the completion, for models trained to fill in the middle."""
    user: str | None = None
    """Not used."""

    def prompts(self) -> list[str | list[int]]:
        """The prompts: one text, one list of token ids, or several of either. Raises `InvalidRequest`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(item, int) for item in self.prompt):
            return [[item for item in self.prompt if isinstance(item, int)]]
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        if not prompts or len(prompts) < len(self.prompt):
            raise InvalidRequest("prompt", "must be a string, token ids, or a list of these, and must not be empty")
        return prompts


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    seed: int
    """A request with this seed reproduces the text."""


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/completions`, not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    """Changes with versions and settings that may affect the text for the same seed."""
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    """For the first choice."""
    verbose: LlamaResponse | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    """With `verbose`: for the first choice."""


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """New text of a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    """Only in the last chunk of the choice."""
    seed: int | UnsetType = UNSET
    """Only in the last chunk of the choice."""


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType = UNSET
    """With `stream_options.include_usage`: in the last chunk, which has no choices. Other chunks have none, as in
    llama-server: OpenAI's API has null there, which some clients take for an answer without tokens."""
    timings: Timings | UnsetType = UNSET
    """In the chunk with the finish reason, in the one with the usage (for the first choice), and with
    `timings_per_token` in others."""
    prompt_progress: PromptProgress | UnsetType = UNSET
    """With `return_progress`, before the first token."""
    verbose: LlamaResponse | LlamaChunk | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    """With `verbose`."""


@generation(routes, "/v1/completions", CompletionRequest, CompletionResponse, in_batches=True)
async def prepare_completion(
    body: CompletionRequest,
    serving: Serving,
    default_max_tokens: int = 16,  # OpenAI's; chat completions have no default
) -> CompletionBuilder:
    """Complete one or more prompts.

    `default_max_tokens`: for requests that do not set it. Raises `InvalidRequest`.
    """
    serving.check(body)
    prompts: Sequence[Prompt] = body.prompts()
    if body.suffix:
        prompts = [fill_in_prompt(serving, prompt, body.suffix) for prompt in prompts]
    response_id = new_id("cmpl-")
    requests = serving.engine_requests(body, response_id, prompts, max_tokens=default_max_tokens)
    builder = CompletionBuilder(body, serving, ResolvedRequest(response_id, requests, body.field_names))
    builder.verbose = await verbose_results(body, requests, serving)
    return builder


def fill_in_prompt(serving: Serving, prefix: Prompt, suffix: str) -> str:
    """The prompt for the text between a prefix and a suffix, in the model's own format."""
    tokens = serving.info.fill_in
    if tokens is None:
        raise InvalidRequest("suffix", f"is not supported: {serving.info.name} was not trained for fill-in-the-middle")
    if not isinstance(prefix, str):
        raise InvalidRequest("suffix", "requires a text prompt, not token ids")
    return f"{tokens.prefix}{prefix}{tokens.suffix}{suffix}{tokens.middle}"


class CompletionBuilder(ChoicesBuilder):
    """Builds the response of a completion."""

    def __init__(self, body: CompletionRequest, serving: Serving, resolved: ResolvedRequest) -> None:
        super().__init__(body, serving, resolved)
        self._wants_logprobs = body.logprobs is not None

    def build(self, completions: list[list[GenerationEvent]]) -> CompletionResponse:
        """Returns the chosen completions as texts."""
        logprobs = [logprobs_of(events) for events in completions]
        choices = [
            CompletionChoice(
                index=index,
                text="".join(event.text for event in completions[i]),
                logprobs=self._logprobs(logprobs[i]),
                finish_reason=self._finish_reason(i),
                seed=self.seed(i),
            )
            for index, i in enumerate(self.select_choices(logprobs))
        ]
        return CompletionResponse(choices=choices, **self.result_fields(completions))

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """Returns chunks with the new text, and the last one with the finish reason."""
        chunks = self.progress_chunks(index, event)
        if event.text or event.logprobs:
            logprobs = self._logprobs(event.logprobs) if event.logprobs else None
            choice = CompletionChunkChoice(index=index, text=event.text, logprobs=logprobs)
            chunks.append(self.chunk([choice], **self.token_fields(index, event)))
        if event.finish_reason:
            last = CompletionChunkChoice(index=index, text="", finish_reason=event.finish_reason, seed=self.seed(index))
            chunks.append(self.chunk([last], **self.end_fields(index)))
        return chunks

    def empty_choice(self, index: int) -> CompletionChunkChoice:
        return CompletionChunkChoice(index=index, text="")

    def chunk(self, choices: list[CompletionChunkChoice], **extras: Unpack[Extras]) -> ServerSentEvent:
        return ServerSentEvent(CompletionChunk(choices=choices, **self.chunk_fields(extras)))

    def _logprobs(self, entries: list[TokenLogprob]) -> CompletionLogprobs | None:
        return completion_logprobs(entries) if self._wants_logprobs else None

    def _finish_reason(self, index: int) -> FinishReason:
        reason = self.last_events[index].finish_reason
        assert reason is not None
        return reason
