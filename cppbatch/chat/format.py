"""How one model holds a conversation: its prompt, and how its text is read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cppbatch.chat.pieces import Piece, Text
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice, callable_tools

Json = dict[str, Any]


class Reader(Protocol):
    def push(self, text: str) -> list[Piece]: ...
    def close(self) -> list[Piece]: ...


class PlainReader:
    def push(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def close(self) -> list[Piece]:
        return []


@dataclass(frozen=True)
class Turn:
    """The assistant's next message: what to generate, and how to read it."""

    prompt: str
    parser: Callable[[], Reader]
    """Makes a reader for one completion."""
    params: Json = field(default_factory=dict)
    renames: dict[str, str] = field(default_factory=dict)
    prefilled: bool = False


class ChatFormat:
    markers: tuple[str, ...] = ()

    def __init__(self, template: ChatTemplate, token_ids: dict[str, int] | None = None) -> None:
        self.template = template

    def turn(
        self,
        messages: list[Json],
        *,
        tools: list[Json],
        choice: ToolChoice,
        schema: Json | bool | None = None,
        variables: Json | None = None,
        goes_on: bool | None = None,
    ) -> Turn:
        callable_tools(tools, choice)
        params = {} if schema is None else {"json_schema": schema}
        return Turn(prompt=self.template.render(messages), parser=PlainReader, params=params)
