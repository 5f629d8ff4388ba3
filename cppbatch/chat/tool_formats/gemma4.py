"""Gemma 4: a notation similar to JSON, with other quotes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.scanning import MarkerFinder, dump_json
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
from cppbatch.chat.tool_formats.tool_format import FUNCTION_NAME, ToolCallFormat

_BEFORE, _AFTER, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(rf"\s*call:\s*({FUNCTION_NAME.pattern})\s*(?=\{{)")
_HEAD_PREFIX = re.compile(rf"\s*(c|ca|cal|call|call:\s*({FUNCTION_NAME.pattern})?\s*)?")
_PLAIN_KEY = re.compile(r"[a-zA-Z_][a-zA-Z0-9_\-.$]*")
_MAX_PARSE_DEPTH = 200
_MAX_GRAMMAR_DEPTH = 16


class Gemma4Format(ToolCallFormat):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>`.

    Arguments in JSON are parsed too. The grammar demands JSON for schemas that this notation cannot enforce.
    """

    name = "gemma4"
    example = '<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>'
    markers = (_BEFORE, _AFTER, _QUOTE)
    start_markers = (_BEFORE,)

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        return _Gemma4ToolParser(calls)

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        calls = []
        for name, schema in lark.each(tools):
            try:
                arguments = self._value_grammar(lark, schema, schema, 0)
            except UnsupportedSchema:
                arguments = lark.json(schema)
            calls.append(f"{lark.literal(f'{_BEFORE}call:{name}')} {arguments} {lark.literal(_AFTER)}")
        return lark.repeat(lark.rule(lark.one_of(calls)), "", several=several)

    def _value_grammar(self, lark: LarkGrammar, given: Any, root: Any, depth: int) -> str:
        """Returns the expression of a value. Raises `UnsupportedSchema`."""
        if depth > _MAX_GRAMMAR_DEPTH:
            raise UnsupportedSchema
        alternatives = schema_variants(given, root)
        if len(alternatives) > 1:
            return lark.one_of([self._value_grammar(lark, one, root, depth + 1) for one in alternatives])
        (schema,) = alternatives
        types = json_types(schema, root)
        if len(types) != 1 or not isinstance(schema, dict):
            raise UnsupportedSchema
        if types == {"string"}:
            return self._string_grammar(lark, schema)
        if enum_values(schema) is None and types == {"object"}:
            return self._object_grammar(lark, schema, root, depth)
        if enum_values(schema) is None and types == {"array"}:
            return self._array_grammar(lark, schema, root, depth)
        if types & {"object", "array"}:
            raise UnsupportedSchema
        return lark.json(standalone_schema(schema, root))

    def _string_grammar(self, lark: LarkGrammar, schema: Any) -> str:
        if (listed := enum_values(schema)) is not None:
            if any(not isinstance(one, str) or _QUOTE in one for one in listed):
                raise UnsupportedSchema
            return f"{lark.literal(_QUOTE)} {lark.one_of([lark.literal(one) for one in listed])} {lark.literal(_QUOTE)}"
        min_length, max_length = string_lengths(schema)
        return f"{lark.literal(_QUOTE)} {lark.text_until(_QUOTE, min_length=min_length, max_length=max_length)}"

    def _array_grammar(self, lark: LarkGrammar, schema: Any, root: Any, depth: int) -> str:
        items, min_items, max_items = array_items(schema)
        item = lark.rule(self._value_grammar(lark, items, root, depth + 1))
        if max_items == 0:
            return lark.literal("[]")
        upper = "" if max_items is None else max_items - 1
        sequence = f'{item} ("," {item}){{{max(min_items - 1, 0)},{upper}}}'
        return f"{lark.literal('[')} {sequence if min_items else f'({sequence})?'} {lark.literal(']')}"

    def _object_grammar(self, lark: LarkGrammar, schema: Any, root: Any, depth: int) -> str:
        """Members are sorted by name, as the template writes them."""
        first, next_ = "", ""  # the remaining members, before any member was written and after one was
        for key, given, required in sorted(object_members(schema), reverse=True):
            if not _PLAIN_KEY.fullmatch(key):
                raise UnsupportedSchema
            member = lark.rule(f"{lark.literal(key + ':')} {self._value_grammar(lark, given, root, depth + 1)}")
            with_member = f"{member} {next_}", f'"," {member} {next_}'
            if required:
                first, next_ = with_member
            else:
                first = lark.one_of([with_member[0], first or '""'])
                next_ = lark.one_of([with_member[1], next_ or '""'])
            first, next_ = lark.rule(first), lark.rule(next_)
        return f"{lark.literal('{')} {first} {lark.literal('}')}"


class _Gemma4ToolParser:
    """Parses the text after `<|tool_call>` and converts it to JSON as it arrives."""

    def __init__(self, calls: ToolCallEmitter) -> None:
        self._calls = calls
        self._unread = ""
        self._open: list[str] = []  # brackets to be closed
        self._quote = MarkerFinder([_QUOTE])
        self._step: Callable[[], bool] = self._head
        self._rest: str | None = None

    def push(self, text: str) -> str | None:
        self._unread += text
        while self._rest is None and self._step():
            pass
        return self._rest

    def close(self) -> None:
        """Leaves an incomplete call as it was emitted."""

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
        elif not _HEAD_PREFIX.fullmatch(self._unread):
            raise MalformedToolCall(self._unread)
        return bool(found)

    def _key(self) -> bool:
        """Before a key or the end of an object."""
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
            if len(self._open) >= _MAX_PARSE_DEPTH:
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
            self._calls.arguments(coerce_to_json(found[0].strip(), ()))
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
        """Starts a string in either kind of quotes, once the opening quote is complete."""
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
