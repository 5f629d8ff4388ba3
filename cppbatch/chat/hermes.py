"""Hermes, Qwen 2.5, Qwen 3, Granite 4 and many others: JSON between tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cppbatch.chat.calls import CallReader, Calls, Tools
from cppbatch.chat.family import Family
from cppbatch.chat.json_calls import JsonCalls, write_json_calls

if TYPE_CHECKING:
    from cppbatch.chat.lark import Lark

_BEFORE, _AFTER = "<tool_call>\n", "\n</tool_call>"


class Hermes(Family):
    """`<tool_call>`, `{"name": ..., "arguments": {...}}`, `</tool_call>`, each on a line of its own."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>",)

    def calls(self, opening: str, calls: Calls) -> CallReader:
        """As `Family.calls`."""
        return JsonCalls(calls, known_only=False, closing="</tool_call>")

    def write_calls(self, lark: Lark, tools: Tools, *, several: bool) -> str:
        """As `Family.write_calls`."""
        call = f"{lark.text(_BEFORE)} {write_json_calls(lark, tools)} {lark.text(_AFTER)}"
        return lark.repeated(lark.rule(call), "\n", several=several)
