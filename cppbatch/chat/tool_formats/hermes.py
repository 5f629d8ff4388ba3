"""Hermes, Qwen 2.5, Qwen 3, Granite 4 and many others: JSON between tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cppbatch.chat.tool_formats.json_calls import JsonCallsParser, json_calls_grammar
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat
from cppbatch.chat.tool_parser import ToolCallEmitter, ToolParser, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.lark_grammar import LarkGrammar

_BEFORE, _AFTER = "<tool_call>\n", "\n</tool_call>"


class HermesFormat(ToolCallFormat):
    """`<tool_call>`, `{"name": ..., "arguments": {...}}`, `</tool_call>`, each on a line of its own."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    start_markers = ("<tool_call>",)

    def calls(self, opening: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.calls`."""
        return JsonCallsParser(calls, known_only=False, closing="</tool_call>")

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        call = f"{lark.text(_BEFORE)} {json_calls_grammar(lark, tools)} {lark.text(_AFTER)}"
        return lark.repeated(lark.rule(call), "\n", several=several)
