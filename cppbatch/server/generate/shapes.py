"""The shapes of the answers of this project's own API, for the OpenAPI document; `replies` makes them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import FinishReason
from cppbatch.server.api_errors import ErrorDetail


class GenerateTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Since the request came."""

    queue_seconds: float
    """To the first step."""
    time_to_first_token_seconds: float
    """0 if there was none."""
    total_seconds: float


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`, not streamed."""

    text: str
    tokens: list[int]
    """Those that were generated."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt's, those that were not computed, but taken from the prefix cache."""
    seed: int
    """With which the text can be had again."""
    timings: GenerateTimings
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
    """Of each token, if asked for."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an item: the fields of a `GenerateAnswer`, or an error."""

    index: int
    """Of the item, from 0."""
    error: ErrorDetail | UnsetType = UNSET
    text: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    finish_reason: FinishReason | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    timings: GenerateTimings | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate/batch`, not streamed."""

    results: list[BatchResult]
    """In the order of the items."""
    total_prompts: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    total_time_seconds: float
    avg_time_per_prompt: float
    """Seconds of the whole, divided by the items."""
    tokens_per_second: float
    """Generated ones."""
