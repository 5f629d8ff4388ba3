"""What an assistant's message is made of, piece by piece as it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index`: 0 for the first of the message."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Part of a call's arguments, which are JSON."""

    index: int
    text: str


Piece = Text | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class Call:
    """A whole tool call."""

    id: str
    name: str
    arguments: str = ""
    """An object as JSON."""


@dataclass(slots=True)
class Message:
    """A whole message of the assistant."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Takes what is new."""
        for piece in pieces:
            if isinstance(piece, Text):
                self.text += piece.text
            elif isinstance(piece, Reasoning):
                self.reasoning += piece.text
            elif isinstance(piece, CallStart):
                self.calls.append(Call(piece.id, piece.name))
            else:
                self.calls[piece.index].arguments += piece.text
