"""The shapes of Anthropic's answers, for the OpenAPI document; `replies` makes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class AnswerBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the message; which fields it has depends on its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    signature: Literal[""] | msgspec.UnsetType = msgspec.UNSET
    """Of thoughts: always empty, nothing is signed here."""
    id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    input: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """The arguments of a call."""


class ThinkingTokens(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.output_tokens_details`."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's tokens are the sum of the three input fields."""

    input_tokens: int
    """Those that had to be computed."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    """Those that came from the prefix cache."""
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/messages`, not streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    """The name that was asked for."""
    content: list[AnswerBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
    ]
    """pause_turn: the request's time was up."""
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    input_tokens: int
