"""The times of a request under llama-server's names: `timings`, and the `prompt_progress` of a stream."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import GenerationEvent, RequestUsage
from cppbatch.server.sampling_fields import TimingFields


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a prompt and its completion."""

    cache_n: int
    """Prompt tokens found in the prefix cache. The other fields do not count them."""
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    """Since the first token, which the computation of the prompt yields: `predicted_n` - 1 tokens took this time."""
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    """Draft tokens that were verified, if there were any."""
    draft_n_accepted: int | UnsetType = UNSET
    """Draft tokens that were accepted."""


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the prompt."""

    total: int
    """Tokens of the prompt."""
    cache: int
    """Tokens found in the prefix cache."""
    processed: int
    """Tokens that are computed, or were found in the cache."""
    time_ms: int
    """Since the request was admitted."""


def timings(usage: RequestUsage) -> Timings:
    """The times so far, or of a completion that has ended."""
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
    """What the events of a stream show of the times, as its request asks: `prompt_progress`, `timings`."""

    def __init__(self, body: TimingFields) -> None:
        self._return_progress, self._per_token = bool(body.return_progress), bool(body.timings_per_token)
        self._prefilled: set[int] = set()  # completions whose whole prompt was shown as processed

    def progress(self, index: int, event: GenerationEvent) -> PromptProgress | UnsetType:
        """The progress of the prompt, with `return_progress`: until all of it is processed."""
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
    """Whether the event has more than the progress of the prompt."""
    return bool(event.text or event.tokens or event.logprobs or event.finish_reason)
