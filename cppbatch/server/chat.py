"""A conversation, from any family's request to the engine's requests, and its pieces from the engine's events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.deltas import AssistantMessage, Delta, ReasoningDelta
from cppbatch.chat.output_parser import OutputParser
from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.errors import InvalidRequest


class Assistant:
    """One message of the assistant while it is generated."""

    def __init__(self, turn: PreparedChat) -> None:
        self._output_parser: OutputParser = turn.output_parser()
        self._thinks = False
        self.message = AssistantMessage()
        """All of it so far."""
        self.reasoning_tokens = 0
        """Tokens of thoughts: counted event by event, and shared out by letters where an event has both."""
        self.finish_reason: str | None = None
        """stop, length, tool_calls or timeout, when it has ended."""

    def read(self, event: GenerationEvent) -> list[Delta]:
        """What an event brings."""
        pieces = self._output_parser.push(event.text) if event.text else []
        if event.finish_reason:
            pieces = [*pieces, *self._output_parser.close()]
        self.message.add(pieces)
        self._count(len(event.tokens), pieces)
        if event.finish_reason:
            called = self.message.calls and event.finish_reason is FinishReason.STOP
            self.finish_reason = "tool_calls" if called else event.finish_reason.value
        return pieces

    def _count(self, n_tokens: int, pieces: list[Delta]) -> None:
        letters = [(len(getattr(piece, "text", "")), isinstance(piece, ReasoningDelta)) for piece in pieces]
        if total := sum(n for n, _ in letters):
            self._thinks = letters[-1][1]
            self.reasoning_tokens += round(n_tokens * sum(n for n, thinks in letters if thinks) / total)
        elif self._thinks:
            self.reasoning_tokens += n_tokens


def effort_variables(effort: str | None) -> dict[str, Any]:
    """A client's degree of reasoning as variables for the chat template."""
    if effort is None:
        return {}
    no_thoughts = {"enable_thinking": False} if effort == "none" else {}  # templates that know no degrees
    return {"reasoning_effort": effort, **no_thoughts}


@contextlib.contextmanager
def naming(names: dict[str, str]) -> Iterator[None]:
    """Errors of what is done here name fields as the client does, where OpenAI's chat has other names for them.

    `names`: parts of field names, replaced one after the other.
    """
    try:
        yield
    except InvalidRequest as error:
        field = error.field
        for ours, theirs in names.items():
            field = field.replace(ours, theirs)
        raise InvalidRequest(field, error.message) from error
