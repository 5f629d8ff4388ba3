"""Gemma 4: a notation of its own, JSON with other quotes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cppbatch.chat.json_text import dump_json
from cppbatch.chat.scanning import MarkerFinder
from cppbatch.chat.schema_types import (
    UnsupportedSchema,
    array_items,
    coerce_to_json,
    enum_values,
    json_types,
    object_members,
    schema_variants,
    standalone_schema,
    string_lengths,
)
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat
from cppbatch.chat.tool_parser import NAME, MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.lark_grammar import LarkGrammar

_BEFORE, _AFTER, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(rf"\s*call:\s*({NAME.pattern})\s*(?=\{{)")
_HEAD_BEGINS = re.compile(rf"\s*(c|ca|cal|call|call:\s*({NAME.pattern})?\s*)?")
_PLAIN_KEY = re.compile(r"[a-zA-Z_][a-zA-Z0-9_\-.$]*")
_DEEPEST = 200
_MOST_LEVELS = 16


class Gemma4Format(ToolCallFormat):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>`.

    JSON as arguments is read as well: it is what is enforced where a schema says more than can be enforced without.
    """

    name = "gemma4"
    markers = (_BEFORE, _AFTER, _QUOTE)
    start_markers = (_BEFORE,)

    def calls(self, opening: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.calls`."""
        return _Gemma4ToolParser(calls)

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        calls = []
        for name, schema in tools.items():
            try:
                arguments = self._write(lark, schema, schema, 0)
            except UnsupportedSchema:
                arguments = lark.json(schema)
            calls.append(f"{lark.text(f'{_BEFORE}call:{name}')} {arguments} {lark.text(_AFTER)}")
        return lark.repeated(lark.rule(lark.one_of(calls)), "", several=several)

    def _write(self, lark: LarkGrammar, given: Any, root: Any, depth: int) -> str:
        """The expression for a value. Raises `UnsupportedSchema`."""
        if depth > _MOST_LEVELS:
            raise UnsupportedSchema
        offered = schema_variants(given, root)
        if len(offered) > 1:
            return lark.one_of([self._write(lark, one, root, depth + 1) for one in offered])
        (schema,) = offered
        kinds = json_types(schema, root)
        if len(kinds) != 1 or not isinstance(schema, dict):
            raise UnsupportedSchema
        if kinds == {"string"}:
            return self._write_string(lark, schema)
        if enum_values(schema) is None and kinds == {"object"}:
            return self._write_object(lark, schema, root, depth)
        if enum_values(schema) is None and kinds == {"array"}:
            return self._write_array(lark, schema, root, depth)
        if kinds & {"object", "array"}:
            raise UnsupportedSchema
        return lark.json(standalone_schema(schema, root))

    def _write_string(self, lark: LarkGrammar, schema: Any) -> str:
        if (listed := enum_values(schema)) is not None:
            if any(not isinstance(one, str) or _QUOTE in one for one in listed):
                raise UnsupportedSchema
            return f"{lark.text(_QUOTE)} {lark.one_of([lark.text(one) for one in listed])} {lark.text(_QUOTE)}"
        least, most = string_lengths(schema)
        return f"{lark.text(_QUOTE)} {lark.up_to(_QUOTE, least=least, most=most)}"

    def _write_array(self, lark: LarkGrammar, schema: Any, root: Any, depth: int) -> str:
        items, least, most = array_items(schema)
        item = lark.rule(self._write(lark, items, root, depth + 1))
        if most == 0:
            return lark.text("[]")
        others = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f"{lark.text('[')} {others if least else f'({others})?'} {lark.text(']')}"

    def _write_object(self, lark: LarkGrammar, schema: Any, root: Any, depth: int) -> str:
        """Members in the order of their names, as the template writes them."""
        first, next_ = "", ""  # what may follow before the first member, and behind one
        for key, given, required in sorted(object_members(schema), reverse=True):
            if not _PLAIN_KEY.fullmatch(key):
                raise UnsupportedSchema
            member = lark.rule(f"{lark.text(key + ':')} {self._write(lark, given, root, depth + 1)}")
            here = f"{member} {next_}", f'"," {member} {next_}'
            if required:
                first, next_ = here
            else:
                first = lark.one_of([here[0], first or '""'])
                next_ = lark.one_of([here[1], next_ or '""'])
            first, next_ = lark.rule(first), lark.rule(next_)
        return f"{lark.text('{')} {first} {lark.text('}')}"


class _Gemma4ToolParser:
    """What follows `<|tool_call>`: rewritten as JSON while it comes."""

    def __init__(self, calls: ToolCallEmitter) -> None:
        self._calls = calls
        self._unread = ""
        self._open: list[str] = []  # brackets to be closed
        self._closed = False
        self._quote = MarkerFinder([_QUOTE])
        self._step: Callable[[], bool] = self._head
        self._rest: str | None = None

    def push(self, text: str) -> str | None:
        """As `ToolParser.push`."""
        self._unread += text
        while self._rest is None and self._step():
            pass
        return self._rest

    def close(self) -> None:
        """What was told stays told."""

    def _take(self, n: int) -> str:
        taken, self._unread = self._unread[:n], self._unread[n:]
        return taken

    def _head(self) -> bool:
        found = _HEAD.match(self._unread)
        if found:
            self._take(found.end() + 1)
            self._calls.start(found[1])
            self._calls.arguments("{")
            self._open, self._step = ["}"], self._key
        elif not _HEAD_BEGINS.fullmatch(self._unread):
            raise MalformedToolCall(self._unread)
        return bool(found)

    def _key(self) -> bool:
        """Before a key, or the end of an object."""
        text = self._unread = self._unread.lstrip()
        if text[:1] == "}":
            self._end_bracket()
            return True
        if text[:1] == '"' or not text or _QUOTE.startswith(text[: len(_QUOTE)]):
            return self._string(self._colon)
        found = re.match(r'([^\s:{}\[\],"<]{1,256})\s*(?=:)', text)
        if found:
            self._take(found.end())
            self._calls.arguments(dump_json(found[1]))
            self._step = self._colon
        elif not re.fullmatch(r'[^\s:{}\[\],"<]{1,256}\s*', text):
            raise MalformedToolCall(text)
        return bool(found)

    def _colon(self) -> bool:
        text = self._unread = self._unread.lstrip()
        if text and text[0] != ":":
            raise MalformedToolCall(text)
        if text:
            self._take(1)
            self._calls.arguments(": ")
            self._step = self._value
        return bool(text)

    def _value(self) -> bool:
        text = self._unread = self._unread.lstrip()
        if text[:1] in ("{", "["):
            if len(self._open) >= _DEEPEST:
                raise MalformedToolCall(text)
            self._open.append("}" if text[0] == "{" else "]")
            self._calls.arguments(self._take(1))
            self._step = self._key if self._open[-1] == "}" else self._value
            return True
        if text[:1] == "]" and self._open[-1] == "]":
            self._end_bracket()
            return True
        if text[:1] == '"' or not text or _QUOTE.startswith(text[: len(_QUOTE)]):
            return self._string(self._after_value)
        found = re.match(r'[^{}\[\],"<]{1,1024}(?=[}\],])', text)
        if found:
            self._take(found.end())
            self._calls.arguments(_scalar(found[0].strip()))
            self._step = self._after_value
        elif not re.fullmatch(r'[^{}\[\],"<]{1,1024}', text):
            raise MalformedToolCall(text)
        return bool(found)

    def _after_value(self) -> bool:
        text = self._unread = self._unread.lstrip()
        if text and text[0] == self._open[-1]:
            self._end_bracket()
        elif text and text[0] == ",":
            self._take(1)
            self._calls.arguments(", ")
            self._step = self._key if self._open[-1] == "}" else self._value
        elif text:
            raise MalformedToolCall(text)
        return bool(text)

    def _end_bracket(self) -> None:
        self._take(1)
        self._calls.arguments(self._open.pop())
        self._step = self._after_value if self._open else self._tail

    def _string(self, then: Callable[[], bool]) -> bool:
        """A string between either kind of quotes begins, if there is enough of it to tell."""
        text = self._unread
        if text.startswith('"'):
            self._take(1)
            self._calls.arguments('"')
            self._step = lambda: self._in_json_string(then)
        elif text.startswith(_QUOTE):
            self._take(len(_QUOTE))
            self._calls.arguments('"')
            self._step = lambda: self._in_string(then)
        return self._unread != text

    def _in_string(self, then: Callable[[], bool]) -> bool:
        before, marker, self._unread = self._quote.split(self._unread)
        self._calls.arguments(dump_json(before)[1:-1])
        if marker:
            self._calls.arguments('"')
            self._step = then
        return bool(marker)

    def _in_json_string(self, then: Callable[[], bool]) -> bool:
        found = re.match(r'(?:[^"\\]|\\.)*', self._unread, re.DOTALL)
        assert found
        self._calls.arguments(self._take(found.end()))
        if self._unread[:1] == '"':
            self._calls.arguments(self._take(1))
            self._step = then
            return True
        return False

    def _tail(self) -> bool:
        text = self._unread.lstrip()
        if text.startswith(_AFTER) or not _AFTER.startswith(text[: len(_AFTER)]):
            self._rest = text.removeprefix(_AFTER)
        return False


def _scalar(text: str) -> str:
    """A number, true, false or null as it is, or as Python writes it; anything else as a string."""
    return coerce_to_json(text, ())
