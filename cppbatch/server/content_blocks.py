"""A message in parts that follow one another, as the APIs want it that show text, thoughts and calls side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cppbatch.chat.deltas import ArgumentsDelta, Delta, ReasoningDelta, TextDelta, ToolCallStart


@dataclass(slots=True)
class Part:
    """A stretch of text or of thoughts, or a call."""

    index: int
    """Its place in the message."""
    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    """Of a call: its arguments, as JSON."""
    call_id: str = ""
    name: str = ""
    """Of the tool that is called."""


class Change(NamedTuple):
    """News of a part: each is opened once, is added to, and is closed before the next one is opened."""

    step: Literal["opened", "added", "closed"]
    part: Part
    text: str = ""
    """What is added."""


class Parts:
    """One message, while its pieces come. A call's arguments are told before the next part begins."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open: Part | None = None

    def read(self, pieces: Iterable[Delta]) -> list[Change]:
        """What the pieces change."""
        changes: list[Change] = []
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                changes += self._begin(Part(len(self.all), "call", call_id=piece.id, name=piece.name))
            elif piece.text:
                changes += self._add(piece)
        return changes

    def close(self) -> list[Change]:
        """Closes the part that is open, if one is."""
        closed = [Change("closed", self._open)] if self._open else []
        self._open = None
        return closed

    def _add(self, piece: TextDelta | ReasoningDelta | ArgumentsDelta) -> list[Change]:
        changes: list[Change] = []
        kind: Literal["text", "reasoning"] = "reasoning" if isinstance(piece, ReasoningDelta) else "text"
        if not isinstance(piece, ArgumentsDelta) and (self._open is None or self._open.kind != kind):
            changes = self._begin(Part(len(self.all), kind))
        part = self.all[-1]
        part.text += piece.text
        return [*changes, Change("added", part, piece.text)]

    def _begin(self, part: Part) -> list[Change]:
        closed = self.close()
        self._open = part
        self.all.append(part)
        return [*closed, Change("opened", part)]
