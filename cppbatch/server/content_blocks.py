"""An assistant message as a sequence of content blocks, for APIs that show text, reasoning and calls in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cppbatch.chat.deltas import ArgumentsDelta, Delta, ReasoningDelta, TextDelta, ToolCallStart


@dataclass(slots=True)
class ContentBlock:
    """A stretch of text, a stretch of reasoning, or a tool call."""

    index: int
    """Its position in the message."""
    kind: Literal["text", "reasoning", "call", "custom"]
    """custom: a call of a custom tool."""
    text: str = ""
    """Of a call: its arguments, as JSON; of a custom tool its text."""
    call_id: str = ""
    name: str = ""
    """The name of the called tool."""


class BlockChange(NamedTuple):
    """A change of a block. Each block starts once, grows, and stops before the next one starts."""

    step: Literal["start", "delta", "stop"]
    block: ContentBlock
    text: str = ""
    """The text that a delta adds."""


class ContentBlocks:
    """The blocks of one message while it is generated."""

    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self._open: ContentBlock | None = None

    def read(self, deltas: Iterable[Delta]) -> list[BlockChange]:
        """Adds the deltas to the blocks."""
        changes: list[BlockChange] = []
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                kind: Literal["call", "custom"] = "custom" if delta.is_custom else "call"
                changes += self._start(ContentBlock(len(self.all), kind, call_id=delta.id, name=delta.name))
            elif delta.text:
                changes += self._add(delta)
        return changes

    def close(self) -> list[BlockChange]:
        """Stops the open block, if there is one."""
        stopped = [BlockChange("stop", self._open)] if self._open else []
        self._open = None
        return stopped

    def _add(self, delta: TextDelta | ReasoningDelta | ArgumentsDelta) -> list[BlockChange]:
        changes: list[BlockChange] = []
        kind: Literal["text", "reasoning"] = "reasoning" if isinstance(delta, ReasoningDelta) else "text"
        if not isinstance(delta, ArgumentsDelta) and (self._open is None or self._open.kind != kind):
            changes = self._start(ContentBlock(len(self.all), kind))
        block = self.all[-1]
        block.text += delta.text
        return [*changes, BlockChange("delta", block, delta.text)]

    def _start(self, block: ContentBlock) -> list[BlockChange]:
        stopped = self.close()
        self._open = block
        self.all.append(block)
        return [*stopped, BlockChange("start", block)]
