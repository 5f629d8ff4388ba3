"""Llama 3.1 to 3.3: a JSON object instead of an answer."""

from __future__ import annotations

import re

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.scanning import dump_json, parse_json
from cppbatch.chat.tool_formats.json_calls import JsonCallsParser, json_calls_grammar
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat

_TAG = "<|python_tag|>"
_CALL = re.compile(r"\s*([\w\-]+)\.call\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r'\s*(\w+)\s*=\s*("(?:[^"\\]|\\.)*"|[^,"]+)\s*(?:,|$)', re.DOTALL)


class Llama3Format(ToolCallFormat):
    """`{"name": ..., "parameters": {...}}` as the whole message; `;` or a new line separates several.

    After `<|python_tag|>` there may be the same, or a call of a built-in tool: `brave_search.call(query="...")`.
    JSON with a name that is not a tool's is text. The templates allow one call in a message, and so does the grammar.
    """

    name = "llama3"
    markers = (_TAG,)
    start_markers = (_TAG,)
    start_prefixes = ("{", "[")
    parallel_calls = False

    def __init__(self, arguments_key: str = "parameters") -> None:
        self._arguments_key = arguments_key
        self.example = f'{{"name": "NAME", "{arguments_key}": {{"KEY": "VALUE"}}}}'

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.tool_parser`."""
        return _PythonTagParser(calls) if start == _TAG else JsonCallsParser(calls, known_only=True)

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        return lark.repeated(lark.rule(json_calls_grammar(lark, tools, key=self._arguments_key)), "; ", several=several)


class _PythonTagParser:
    """Parses the text from `<|python_tag|>` to the end of the message."""

    def __init__(self, calls: ToolCallEmitter) -> None:
        self._calls = calls
        self._unread = ""
        self._json: JsonCallsParser | None = None

    def push(self, text: str) -> str | None:
        """As `ToolParser.push`."""
        self._unread += text
        if self._json is None and self._unread.lstrip()[:1] in ("{", "["):
            self._json = JsonCallsParser(self._calls, known_only=True)
        if self._json is None:
            return None
        text, self._unread = self._unread, ""
        return self._json.push(text)

    def close(self) -> None:
        """As `ToolParser.close`. A call of a built-in tool is complete only here."""
        if self._json:
            return
        found = _CALL.fullmatch(self._unread)
        arguments = _parse_keywords(found[2]) if found else None
        if not found or arguments is None or found[1] not in self._calls.tools:
            raise MalformedToolCall(self._unread)
        self._calls.start(found[1])
        self._calls.arguments(dump_json(arguments))


def _parse_keywords(text: str) -> dict[str, object] | None:
    """Parses `a="b", c=1` into a dictionary. Returns None for other text."""
    arguments: dict[str, object] = {}
    at = 0
    while at < len(text.rstrip()):
        found = _ARGUMENT.match(text, at)
        if found is None:
            return None
        at = found.end()
        try:
            arguments[found[1]] = parse_json(found[2].strip())
        except ValueError:
            arguments[found[1]] = found[2].strip().strip("'\"")
    return arguments
