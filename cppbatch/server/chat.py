"""A conversation, from any family's request to the engine's requests, and its pieces from the engine's events."""

from __future__ import annotations

from cppbatch.chat.format import Reader, Turn
from cppbatch.chat.pieces import Message, Piece
from cppbatch.engine.request import FinishReason, GenerationEvent


class Assistant:
    """One message of the assistant while it is generated."""

    def __init__(self, turn: Turn) -> None:
        self._reader: Reader = turn.parser()
        self.message = Message()
        """All of it so far."""
        self.finish_reason: str | None = None
        """stop, length, tool_calls or timeout, when it has ended."""

    def read(self, event: GenerationEvent) -> list[Piece]:
        """What an event brings."""
        pieces = self._reader.push(event.text) if event.text else []
        if event.finish_reason:
            pieces = [*pieces, *self._reader.close()]
        self.message.add(pieces)
        if event.finish_reason:
            called = self.message.calls and event.finish_reason is FinishReason.STOP
            self.finish_reason = "tool_calls" if called else event.finish_reason.value
        return pieces
