"""llama-server's description of a completion: what `/completion` answers, and other APIs as `__verbose`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    TokenLogprob,
    TokenPiece,
    detokenize,
)
from cppbatch.server.llama_settings import GenerationSettings, generation_settings
from cppbatch.server.response_logprobs import CompletionProbability, completion_probabilities
from cppbatch.server.sampling_fields import TimingFields
from cppbatch.server.serving import Serving
from cppbatch.server.timings import PromptProgress, Timings, timings

_NO_SLOT = -1


class LlamaResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A completion that is not streamed, and the last event of a stream (with empty `content` and `tokens`)."""

    index: int
    content: str
    tokens: list[int]
    """With `return_tokens`."""
    id_slot: int
    """-1: requests have no slots of their own."""
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    """Prompt tokens."""
    generation_settings: GenerationSettings
    prompt: str
    """The prompt's tokens as text."""
    has_new_line: bool
    truncated: bool
    """Whether the completion ended because the context was full, or tokens were dropped from it (`--context-shift`)."""
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    """Tokens of prompt and completion whose keys and values the next request can use."""
    timings: Timings
    completion_probabilities: list[CompletionProbability] | UnsetType = UNSET
    """With `n_probs`."""


class LlamaChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream, except the last."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | UnsetType = UNSET
    """With `timings_per_token`."""
    prompt_progress: PromptProgress | UnsetType = UNSET
    """With `return_progress`, before the first token."""
    completion_probabilities: list[CompletionProbability] | UnsetType = UNSET
    """With `n_probs`."""


class LlamaResults:
    """The results of the completions of one request.

    `prompts`: the tokens of each prompt. Completions of the same prompt have consecutive indices. `return_tokens`: the
    results have the token ids.
    """

    def __init__(
        self,
        body: TimingFields,
        requests: list[GenerationRequest],
        prompts: list[list[TokenPiece]],
        serving: Serving,
        *,
        return_tokens: bool = False,
    ) -> None:
        self._body = body
        self._requests = requests
        self._prompts = prompts
        self._model = serving.name
        self._max_sequence = serving.info.max_sequence
        self._n_keep = serving.client.config.n_keep
        self._end_tokens = serving.info.end_tokens
        self._return_tokens = return_tokens
        self._n_candidates = body.n_candidates
        self._n_predicted = [0] * len(requests)
        self._has_new_line = [False] * len(requests)

    def record(self, index: int, event: GenerationEvent) -> None:
        """Counts what is new in an event, before it is shown."""
        self._n_predicted[index] += len(event.tokens)
        if event.finish_reason and event.usage:  # with the end token
            self._n_predicted[index] = event.usage.completion_tokens
        self._has_new_line[index] |= "\n" in event.text

    def chunk(
        self,
        index: int,
        event: GenerationEvent,
        *,
        timings: Timings | UnsetType = UNSET,
        prompt_progress: PromptProgress | UnsetType = UNSET,
    ) -> LlamaChunk:
        """An event of a stream."""
        return LlamaChunk(
            index=index,
            content=event.text,
            tokens=event.tokens,
            stop=False,
            id_slot=_NO_SLOT,
            tokens_predicted=self._n_predicted[index],
            tokens_evaluated=len(self._prompts[index // self._n_candidates]),
            timings=timings,
            prompt_progress=prompt_progress,
            completion_probabilities=_probabilities(self._requests[index], event.logprobs),
        )

    def response(self, index: int, last: GenerationEvent, events: Sequence[GenerationEvent]) -> LlamaResponse:
        """The result of a completion whose last event is `last`, with the content of `events`."""
        request = self._requests[index]
        params = request.params
        assert last.usage
        n_prompt, n_predicted = last.usage.prompt_tokens, self._n_predicted[index]
        logprobs = [entry for event in events for entry in event.logprobs]
        stop_type = _stop_type(last)
        n_tokens = n_prompt + n_predicted
        return LlamaResponse(
            index=index,
            content="".join(event.text for event in events),
            tokens=[token for event in events for token in event.tokens] if self._return_tokens else [],
            id_slot=_NO_SLOT,
            stop=True,
            model=self._model,
            tokens_predicted=n_predicted,
            tokens_evaluated=n_prompt,
            generation_settings=generation_settings(
                params,
                n_keep=self._n_keep if request.n_keep is None else request.n_keep,
                n_discard=request.n_discard,
                stream=bool(self._body.stream),
                timings_per_token=bool(self._body.timings_per_token),
                seed=last.seed,
                end_tokens=self._end_tokens,
            ),
            prompt=detokenize(self._prompts[index // self._n_candidates]),
            has_new_line=self._has_new_line[index],
            truncated=last.usage.context_shifts > 0
            or (stop_type == "limit" and n_tokens >= self._max_sequence and n_predicted != params.max_tokens),
            stop_type=stop_type,
            stopping_word=last.stop or "",
            tokens_cached=min(n_tokens, self._max_sequence) - (n_predicted > 0),  # the last token was not computed
            timings=timings(last.usage),
            completion_probabilities=_probabilities(request, logprobs),
        )


def _probabilities(request: GenerationRequest, logprobs: list[TokenLogprob]) -> list[CompletionProbability] | UnsetType:
    if not logprobs:
        return UNSET
    return completion_probabilities(logprobs, post_sampling=request.params.post_sampling_probs)


def _stop_type(last: GenerationEvent) -> Literal["eos", "limit", "word"]:
    if last.finish_reason is not FinishReason.STOP:
        return "limit"
    return "eos" if last.stop is None else "word"
