"""An assistant's message and the deltas it is streamed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning, which the model writes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call starts. `index`: 0 for the first call of the message."""

    index: int
    id: str
    name: str
    is_custom: bool = False
    """Of a custom tool, whose arguments are a text."""


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a tool call's arguments, which are JSON text, or of a custom tool's text."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


@dataclass(slots=True)
class ToolCall:
    """A complete tool call."""

    id: str
    name: str
    arguments: str = ""
    """A JSON object as text; of a custom tool its text."""
    is_custom: bool = False


@dataclass(slots=True)
class AssistantMessage:
    """A complete message, merged from deltas."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Appends deltas."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self.text += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            elif isinstance(delta, ToolCallStart):
                self.calls.append(ToolCall(delta.id, delta.name, is_custom=delta.is_custom))
            else:
                self.calls[delta.index].arguments += delta.text


def openai_message(text: str, reasoning: str, calls: list[ToolCall]) -> dict[str, Any]:
    """The assistant's message as OpenAI's object, which templates render when it is sent back."""
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_openai_call(call) for call in calls]
    return message


def _openai_call(call: ToolCall) -> dict[str, Any]:
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
