"""Custom tools, which take a text instead of arguments: the model sees a function with the argument `input`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from cppbatch.chat.escaped_lark import INPUT, LARK, UnsupportedGrammar, escape_lark
from cppbatch.chat.output_parser import ArgumentsDelta, Delta, OutputParser, ToolCallStart
from cppbatch.errors import InvalidRequest

Json = dict[str, Any]

_PREFIX = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_PREFIX = 64  # characters of a prefix
_STRING_PART = re.compile(r'(?:[^"\\]|\\(?:[^u]|u(?!d[89ab])[0-9a-f]{4}|ud[89ab][0-9a-f]{2}\\u[0-9a-f]{4}))*', re.I)


def has_grammar(custom: Json) -> bool:
    """Whether the custom tool has a grammar."""
    return bool(_format(custom)["type"] == "grammar")


def _format(custom: Json) -> Json:
    return custom.get("format") or {"type": "text"}


def as_function(i: int, custom: Json) -> Json:
    """The function for a custom tool, which is tool `i` of the request. Raises `InvalidRequest` for its format."""
    schema: Json = {"type": "string"}
    given, field = _format(custom), f"tools[{i}].custom.format"
    if given["type"] == "grammar":
        syntax, definition = given["grammar"]["syntax"], given["grammar"]["definition"]
        if syntax == "regex":
            schema["pattern"] = f"^(?:{definition})$"
        elif syntax == "lark":
            schema[LARK] = definition
            try:
                escape_lark(definition)
            except UnsupportedGrammar as error:
                raise InvalidRequest(f"{field}.grammar.definition", str(error)) from error
        else:
            raise InvalidRequest(f"{field}.grammar.syntax", f"is {syntax!r:.80}; it must be lark or regex")
    elif given["type"] != "text":
        raise InvalidRequest(f"{field}.type", f"is {given['type']!r:.80}; it must be text or grammar")
    function = {
        "name": custom["name"],
        "parameters": {
            "type": "object",
            "properties": {INPUT: schema},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }
    if custom.get("description"):
        function["description"] = custom["description"]
    return {"type": "function", "function": function}


class CustomCallParser:
    """Parses with another `OutputParser`, and converts calls of the tools `names` to custom calls with their text.

    Without a grammar, a model may write arguments other than the input: then their JSON is the text.
    """

    def __init__(self, parser: OutputParser, names: Collection[str]) -> None:
        self._parser = parser
        self._names = names
        self._open: tuple[int, _InputReader] | None = None  # the custom call whose arguments come now

    def push(self, text: str) -> list[Delta]:
        """Returns deltas in which calls of custom tools have text as arguments."""
        return self._convert(self._parser.push(text))

    def close(self) -> list[Delta]:
        """Ends the completion and the open custom call."""
        return [*self._convert(self._parser.close()), *self._end()]

    def _convert(self, deltas: list[Delta]) -> list[Delta]:
        converted: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                converted += self._end()
                is_custom = delta.name in self._names
                self._open = (delta.index, _InputReader()) if is_custom else None
                converted.append(ToolCallStart(delta.index, delta.id, delta.name, is_custom=is_custom))
            elif isinstance(delta, ArgumentsDelta) and self._open:
                if text := self._open[1].push(delta.text):
                    converted.append(ArgumentsDelta(delta.index, text))
            else:
                converted.append(delta)
        return converted

    def _end(self) -> list[Delta]:
        if self._open is None:
            return []
        (index, reader), self._open = self._open, None
        left = reader.close()
        return [ArgumentsDelta(index, left)] if left else []


class _InputReader:
    """Reads `{"input": "..."}` and returns the text, as far as it is complete. Returns other JSON unchanged."""

    def __init__(self) -> None:
        self._unread = ""
        self._state = "prefix"

    def push(self, arguments: str) -> str:
        self._unread += arguments
        if self._state == "prefix":
            if found := _PREFIX.match(self._unread):
                self._unread, self._state = self._unread[found.end() :], "text"
            elif len(self._unread) > _MAX_PREFIX:
                self._state = "other"
        if self._state == "other":
            text, self._unread = self._unread, ""
            return text
        return self._text() if self._state == "text" else ""

    def close(self) -> str:
        return self._unread if self._state == "prefix" else ""

    def _text(self) -> str:
        part = _STRING_PART.match(self._unread)
        assert part  # it matches the empty text
        self._unread = self._unread[part.end() :]
        if self._unread.startswith('"'):
            self._state = "end"
        try:
            return str(json.loads(f'"{part[0]}"', strict=False))
        except ValueError:  # an escape that JSON does not have
            return part[0]
