"""What readers of tool calls share: where they tell what they find, and how they say that it is no call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from cppbatch.chat.deltas import ArgumentsDelta, Delta, ToolCallStart

Json = dict[str, Any]
ToolSchemas = dict[str, Any]
"""The JSON schemas of the parameters, by the functions' names."""

NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")
"""What a function's name may look like where nothing else marks its end."""


class MalformedToolCall(Exception):
    """The text is no call, or not any more. `rest`: what of it has not been told."""

    def __init__(self, rest: str) -> None:
        super().__init__(rest)
        self.rest = rest


class ToolCallEmitter:
    """The calls of one message; each goes to `out` as it becomes known."""

    def __init__(self, tools: ToolSchemas, new_call_id: Callable[[], str], out: list[Delta]) -> None:
        self.tools = tools
        self.count = 0
        self._new_id = new_call_id
        self._out = out

    def start(self, name: str, call_id: str | None = None) -> None:
        """A call begins; it gets an id unless the model gave it one."""
        self._out.append(ToolCallStart(self.count, call_id or self._new_id(), name))
        self.count += 1

    def arguments(self, text: str) -> None:
        """Part of its arguments."""
        if text:
            self._out.append(ArgumentsDelta(self.count - 1, text))


class ToolParser(Protocol):
    """Reads one block of calls; what it finds goes to a `ToolCallEmitter`.

    What it does depends on the letters alone, not on how they are spread over pushes.
    """

    def push(self, text: str) -> str | None:
        """What came after the block, once it has ended. Raises `MalformedToolCall`."""
        ...

    def close(self) -> None:
        """The message has ended. Raises `MalformedToolCall`."""
        ...
