"""The shapes of OpenAI's answers, for the OpenAPI document; `replies` makes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cppbatch.engine.request import FinishReason


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class AnswerUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all choices; the prompt's once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    seed: int
    """With which the text can be had again."""


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/completions`, not streamed (`cppbatch.server.answers`)."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: AnswerUsage


class AnswerFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function and the arguments to call it with, which are an object as JSON."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    """None, when there are only calls."""
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """What it thought before."""
    tool_calls: list[AnswerCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "timeout"]
    seed: int


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`, not streamed (`cppbatch.server.answers`)."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: AnswerUsage
