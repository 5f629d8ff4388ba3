"""The shapes of OpenAI's responses, for the OpenAPI document; `replies` makes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class OutputItem(msgspec.Struct, frozen=True, kw_only=True):
    """Text, thoughts or a call; which fields it has depends on its type."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """One `output_text`, or one `reasoning_text`."""
    summary: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """Of thoughts: empty, they are there themselves."""
    call_id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    """Of a call: an object as JSON."""


class InputTokenDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.input_tokens_details`."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokenDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.output_tokens_details`."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why the answer is not whole."""

    reason: Literal["max_output_tokens", "timeout"]


class ReasoningAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`, as it was asked for."""

    effort: str | None
    summary: None


class TextAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`text`, as it was asked for."""

    format: dict[str, Any]


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/responses`, not streamed."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningAnswer
    background: Literal[False]
    store: Literal[False]
    temperature: float
    text: TextAnswer
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
