"""An assistant message while it is generated: from the engine's events to deltas of text, reasoning and tool calls."""

from __future__ import annotations

from typing import Literal

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.deltas import AssistantMessage, Delta, ReasoningDelta
from cppbatch.chat.output_parser import OutputParser
from cppbatch.engine.request import FinishReason, GenerationEvent

FinishReasonName = Literal["stop", "length", "tool_calls", "timeout"]

_FINISH_REASONS: dict[FinishReason, FinishReasonName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "timeout",
}
"""A message that is cancelled or fails has none of these."""


class AssistantOutput:
    """The output of one chat completion."""

    def __init__(self, chat: PreparedChat) -> None:
        self._output_parser: OutputParser = chat.output_parser()
        self._is_reasoning = False
        self.message = AssistantMessage()
        """The message so far."""
        self.reasoning_tokens = 0
        """Tokens of reasoning. Counted event by event; an event with both reasoning and other text is split in
        proportion to its characters, so the figure is then an estimate."""
        self.finish_reason: FinishReasonName | None = None
        """None until the message has ended, and if it was cancelled or failed."""

    def read(self, event: GenerationEvent) -> list[Delta]:
        """The deltas of an event."""
        deltas = self._output_parser.push(event.text) if event.text else []
        if event.finish_reason:
            deltas = [*deltas, *self._output_parser.close()]
        self.message.add(deltas)
        self._count_reasoning(len(event.tokens), deltas)
        if event.finish_reason:
            has_called = self.message.calls and event.finish_reason is FinishReason.STOP
            self.finish_reason = "tool_calls" if has_called else _FINISH_REASONS.get(event.finish_reason)
        return deltas

    def _count_reasoning(self, n_tokens: int, deltas: list[Delta]) -> None:
        sizes = [(len(getattr(delta, "text", "")), isinstance(delta, ReasoningDelta)) for delta in deltas]
        if total := sum(n for n, _ in sizes):
            self._is_reasoning = sizes[-1][1]
            self.reasoning_tokens += round(n_tokens * sum(n for n, is_reasoning in sizes if is_reasoning) / total)
        elif self._is_reasoning:
            self.reasoning_tokens += n_tokens
