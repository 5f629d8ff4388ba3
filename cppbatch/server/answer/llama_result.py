"""Response parts of llama-server's API, also used as extensions in OpenAI's API: settings, timings, probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.engine.params import KINDS, PARAMS, UNLIMITED, SamplingParams
from cppbatch.engine.request import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    RequestUsage,
    TokenLogprob,
    TokenPiece,
    detokenize,
)
from cppbatch.server.answer.logprobs import CompletionProbability, completion_probabilities
from cppbatch.server.fields.sampling import TimingFields
from cppbatch.server.models.serving import Serving

_NO_SLOT = -1


class LlamaResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A completion that is not streamed, and the last event of a stream (with empty `content` and `tokens`)."""

    index: int
    content: str
    tokens: list[int]
    """With `return_tokens`."""
    id_slot: int
    """-1: requests are not assigned to slots."""
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
    """Whether the completion ended because the context was full, or a context shift dropped tokens."""
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    """Tokens of prompt and completion that the next request can reuse from the cache."""
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

    `prompts`: the tokens of each prompt. Completions of the same prompt have consecutive indices. `return_tokens`:
    whether the results include the token ids.
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
        """Counts the new tokens of an event, before it is sent."""
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


# --- llama settings --------------------------------------------------------------------------------------------------
# The sampling parameters of a completion, under llama-server's names.


RANDOM_SEED = 2**32 - 1
"""llama-server's value for a random seed."""

LLAMA_NAMES = {"typical_p": "typ_p"}
"""llama-server's names for samplers, where they differ from `SamplingParams`."""


class TokenBias(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `logit_bias`."""

    token: int
    bias: float | None
    """None: the token is never sampled."""


_SAME = tuple(
    name
    for name in (*PARAMS, "stop", "post_sampling_probs")
    if name not in ("repetition_penalty", "penalty_last_n", "samplers", "seed")
)
"""The settings that `SamplingParams` has under the same names."""
if TYPE_CHECKING:
    _SameSettings = msgspec.Struct
else:
    _SameSettings = msgspec.defstruct(
        "_SameSettings", [(name, KINDS[name]) for name in _SAME], module=__name__, frozen=True, kw_only=True
    )


class GenerationSettings(_SameSettings, frozen=True, kw_only=True):
    """The settings of a completion."""

    seed: int
    """2^32 - 1: random."""
    repeat_penalty: float
    repeat_last_n: int
    max_tokens: int
    """-1: unlimited."""
    n_predict: int
    """Same as `max_tokens`."""
    n_keep: int
    n_discard: int
    stream: bool
    logit_bias: list[TokenBias]
    n_probs: int
    min_keep: int = 0
    grammar: str
    samplers: list[str]
    timings_per_token: bool


def generation_settings(
    params: SamplingParams,
    *,
    n_keep: int = 0,
    n_discard: int = 0,
    stream: bool = False,
    timings_per_token: bool = False,
    seed: int | None = None,
    end_tokens: Sequence[int] = (),
) -> GenerationSettings:
    """The settings for these parameters. `seed`: the actual seed; None: not known yet. `end_tokens`: the model's, which
    `ignore_eos` suppresses."""
    biases = [TokenBias(token=int(token), bias=bias) for token, bias in params.logit_bias.items()]
    if params.ignore_eos:
        biases += [TokenBias(token=token, bias=None) for token in end_tokens]
    n_predict = UNLIMITED if params.max_tokens is None else params.max_tokens
    return GenerationSettings(
        **{name: getattr(params, name) for name in _SAME},
        seed=RANDOM_SEED if seed is None else seed,
        repeat_penalty=params.repetition_penalty,
        repeat_last_n=params.penalty_last_n,
        max_tokens=n_predict,
        n_predict=n_predict,
        n_keep=n_keep,
        n_discard=n_discard,
        stream=stream,
        logit_bias=biases,
        n_probs=params.logprobs or 0,
        grammar=params.grammar or "",
        samplers=[LLAMA_NAMES.get(name, name) for name in params.samplers],
        timings_per_token=timings_per_token,
    )


# --- timings ---------------------------------------------------------------------------------------------------------
# The times of a request under llama-server's names: `timings`, and the `prompt_progress` of a stream.


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The times and speed of a prompt and its completion."""

    cache_n: int
    """Prompt tokens found in the prefix cache; not counted in the other fields."""
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    """Time since the first token, which the prompt's computation yields: the time of `predicted_n` - 1 tokens."""
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    """Verified draft tokens, if any."""
    draft_n_accepted: int | UnsetType = UNSET
    """Accepted draft tokens."""


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the prompt."""

    total: int
    """Tokens of the prompt."""
    cache: int
    """Tokens found in the prefix cache."""
    processed: int
    """Tokens that were computed or found in the cache."""
    time_ms: int
    """Since the request was admitted."""


def timings(usage: RequestUsage) -> Timings:
    """The times so far, or those of a finished completion."""
    prompt_end = _prompt_end(usage)
    prompt_n, prompt_seconds = usage.prefilled_tokens - usage.cached_tokens, prompt_end - usage.queue_seconds
    steps, seconds = max(0, usage.completion_tokens - 1), usage.total_seconds - prompt_end
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=prompt_n,
        prompt_ms=prompt_seconds * 1000,
        prompt_per_token_ms=prompt_seconds * 1000 / prompt_n if prompt_n else 0.0,
        prompt_per_second=prompt_n / prompt_seconds if prompt_seconds > 0 else 0.0,
        predicted_n=usage.completion_tokens,
        predicted_ms=seconds * 1000,
        predicted_per_token_ms=seconds * 1000 / steps if steps else 0.0,
        predicted_per_second=steps / seconds if seconds > 0 else 0.0,
        draft_n=usage.drafted_tokens or UNSET,
        draft_n_accepted=usage.accepted_tokens if usage.drafted_tokens else UNSET,
    )


def _prompt_end(usage: RequestUsage) -> float:
    return usage.first_token_seconds or usage.total_seconds


class StreamTimings:
    """Times in the events of a stream, if requested: `prompt_progress`, `timings`."""

    def __init__(self, body: TimingFields) -> None:
        self._return_progress, self._per_token = bool(body.return_progress), bool(body.timings_per_token)
        self._prefilled: set[int] = set()  # completions whose prompt was reported as fully processed

    def progress(self, index: int, event: GenerationEvent) -> PromptProgress | UnsetType:
        """The progress of the prompt, with `return_progress`, until it is fully processed."""
        usage = event.usage
        if not self._return_progress or usage is None or index in self._prefilled:
            return UNSET
        if usage.prefilled_tokens >= usage.prompt_tokens:
            self._prefilled.add(index)
        return PromptProgress(
            total=usage.prompt_tokens,
            cache=usage.cached_tokens,
            processed=usage.prefilled_tokens,
            time_ms=round(1000 * (_prompt_end(usage) - usage.queue_seconds)),
        )

    def per_token(self, event: GenerationEvent) -> Timings | UnsetType:
        """The times so far, with `timings_per_token`."""
        return timings(event.usage) if self._per_token and event.usage else UNSET


def has_output(event: GenerationEvent) -> bool:
    """Whether the event has more than prompt progress."""
    return bool(event.text or event.tokens or event.logprobs or event.finish_reason)
