"""What an assistant's message is made of, piece by piece as it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. `index`: 0 for the first of the message."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Part of a call's arguments, which are JSON."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


@dataclass(slots=True)
class ToolCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str = ""
    """An object as JSON."""


@dataclass(slots=True)
class AssistantMessage:
    """A whole message of the assistant."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Delta]) -> None:
        """Takes what is new."""
        for piece in pieces:
            if isinstance(piece, TextDelta):
                self.text += piece.text
            elif isinstance(piece, ReasoningDelta):
                self.reasoning += piece.text
            elif isinstance(piece, ToolCallStart):
                self.calls.append(ToolCall(piece.id, piece.name))
            else:
                self.calls[piece.index].arguments += piece.text
