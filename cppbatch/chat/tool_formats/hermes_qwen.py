"""Qwen 3 Coder, Qwen 3.5, Nemotron 3, Seed-OSS: a tag for each argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cppbatch.chat.json_text import InvalidJson, JsonValueScanner, dump_json
from cppbatch.chat.scanning import MarkerFinder
from cppbatch.chat.schema_types import (
    UnsupportedSchema,
    coerce_to_json,
    enum_values,
    json_types,
    object_members,
    resolve_ref,
    schema_variants,
    standalone_schema,
    string_lengths,
)
from cppbatch.chat.tool_formats.json_calls import JsonCallsParser, json_calls_grammar
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat
from cppbatch.chat.tool_parser import NAME, MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.lark_grammar import LarkGrammar

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_OF_FUNCTION, _END_OF_PARAMETER = "</function>", "</parameter>"
_NAME = re.compile(rf"({NAME.pattern})>")
_NAME_BEGINS = re.compile(rf"({NAME.pattern})?")
_KEY = re.compile(r"([^<>\n]{1,256})>")
_KEY_BEGINS = re.compile(r"[^<>\n]{0,256}")


class QwenXmlFormat(ToolCallFormat):
    """`<tool_call>`, `<function=name>`, `<parameter=key>` and a value for each argument.

    Values have the types that the tool's schema says. JSON between the tags is read as well: it is what is enforced
    where a schema says more than can be enforced without JSON. `own_lines`: values stand on lines of their own.
    """

    name = "qwen_xml"

    def __init__(self, tag: str = "tool_call", *, own_lines: bool = True) -> None:
        self._tag = f"<{tag}>"
        self._closing = f"</{tag}>"
        self._line = "\n" if own_lines else ""
        self.markers = self._tag, self._closing
        self.start_markers = self._tag, _FUNCTION  # the first is forgotten at times

    def calls(self, opening: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.calls`."""
        reader = _XmlToolParser(calls, self._closing)
        if opening == _FUNCTION:
            reader.push(opening)
        return reader

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        calls = []
        for name, schema in tools.items():
            try:
                calls.append(self._write_call(lark, name, schema))
            except UnsupportedSchema:
                calls.append(f"{json_calls_grammar(lark, {name: schema})} {lark.text(_NEW_LINE)}")
        before, after = lark.text(self._tag + "\n"), lark.text(self._closing)
        return lark.repeated(lark.rule(f"{before} {lark.one_of(calls)} {after}"), "\n", several=several)

    def _write_call(self, lark: LarkGrammar, name: str, schema: Any) -> str:
        parts = [lark.text(f"{_FUNCTION}{name}>\n")]
        for key, given, required in object_members(schema):
            if not _KEY_BEGINS.fullmatch(key) or not key:
                raise UnsupportedSchema
            value = self._write_value(lark, given, schema)
            parameter = f"{lark.text(f'{_PARAMETER}{key}>{self._line}')} {value}"
            parts.append(parameter if required else f"({parameter})?")
        return " ".join([*parts, lark.text(f"{_END_OF_FUNCTION}\n")])

    def _write_value(self, lark: LarkGrammar, given: Any, root: Any) -> str:
        """The expression for a value and the end of its tag. Raises `UnsupportedSchema`."""
        ending = f"{self._line}{_END_OF_PARAMETER}\n"
        kinds, schema = json_types(given, root), resolve_ref(given, root)
        if kinds == {"string", "null"}:  # the word null is null, any other text a string
            strings = [part for part in schema_variants(given, root) if part.get("type") != "null"]
            if any((string_lengths(part), enum_values(part)) != ((0, None), None) for part in strings):
                raise UnsupportedSchema
            return lark.up_to(_END_OF_PARAMETER, ending=ending)
        if kinds == {"string"}:
            if (listed := enum_values(schema)) is not None:
                if any(not isinstance(one, str) or one != one.strip() or _END_OF_PARAMETER in one for one in listed):
                    raise UnsupportedSchema
                return f"{lark.one_of([lark.text(one) for one in listed])} {lark.text(ending)}"
            least, most = string_lengths(schema)
            return lark.up_to(_END_OF_PARAMETER, ending=ending, least=least, most=most)
        if not kinds or "string" in kinds:  # no quotes would tell a string from another value
            raise UnsupportedSchema
        return f"{lark.json(standalone_schema(given, root))} {lark.text(ending)}"


_NEW_LINE = "\n"


class _XmlToolParser:
    """What follows `<tool_call>`."""

    def __init__(self, calls: ToolCallEmitter, closing: str) -> None:
        self._calls = calls
        self._closing = closing
        self._between = MarkerFinder([closing, _FUNCTION])
        self._within = MarkerFinder([closing, _PARAMETER, _END_OF_FUNCTION, _FUNCTION])
        self._unread = ""
        self._json: JsonCallsParser | None = None
        self._schema: Any = {}
        self._kinds: frozenset[str] = frozenset()
        self._n_arguments = 0
        self._n_functions = 0
        self._value = ""  # what is read of a value that is no string
        self._json_end: JsonValueScanner | None = None
        self._is_first_letter = False
        self._end = MarkerFinder([_END_OF_PARAMETER])
        self._step: Callable[[], bool] = self._in_between
        self._rest: str | None = None

    def push(self, text: str) -> str | None:
        """As `ToolParser.push`."""
        if self._json:
            return self._json.push(text)
        self._unread += text
        while self._rest is None and self._step():
            pass
        if self._json:
            return self._json.push(self._unread)
        return self._rest

    def close(self) -> None:
        """What was told stays told."""

    def _in_between(self) -> bool:
        """Before a function, or behind one."""
        text = self._unread = self._unread.lstrip()
        if not text:
            return False
        if text[0] in "{[" and not self._n_functions:
            self._json = JsonCallsParser(self._calls, known_only=False, closing=self._closing)
            return False
        marker = self._between.at_start(text)
        if marker is None and self._n_functions:
            self._rest = text
        elif marker is None:
            raise MalformedToolCall(text)
        elif marker == self._closing:
            self._rest = text[len(marker) :]
        elif marker:
            self._unread, self._step = text[len(marker) :], self._in_name
        return bool(marker)

    def _in_name(self) -> bool:
        found = _NAME.match(self._unread)
        if found:
            self._schema = self._calls.tools.get(found[1]) or {}
            self._n_arguments, self._n_functions = 0, self._n_functions + 1
            self._unread, self._step = self._unread[found.end() :], self._in_function
            self._calls.start(found[1])
        elif not _NAME_BEGINS.fullmatch(self._unread):
            raise MalformedToolCall(f"{_FUNCTION}{self._unread}")
        return bool(found)

    def _in_function(self) -> bool:
        """Between arguments."""
        text = self._unread = self._unread.lstrip()
        marker = self._within.at_start(text) if text else ""
        if marker == _PARAMETER:
            self._unread, self._step = text[len(marker) :], self._in_key
        elif marker == "":
            return False
        else:  # what belongs to no argument ends the function
            self._calls.arguments("}" if self._n_arguments else "{}")
            self._unread = text.removeprefix(_END_OF_FUNCTION)
            self._step = self._in_between
        return True

    def _in_key(self) -> bool:
        found = _KEY.match(self._unread)
        if found:
            key = found[1].strip()
            properties = self._schema.get("properties") or {}
            self._kinds = json_types(properties.get(key, {}), self._schema)
            self._calls.arguments(f"{', ' if self._n_arguments else '{'}{dump_json(key)}: ")
            self._calls.arguments('"' if self._kinds == {"string"} else "")
            self._n_arguments += 1
            self._unread, self._value, self._is_first_letter = self._unread[found.end() :], "", True
            self._json_end = None if "string" in self._kinds else JsonValueScanner()
            self._step = self._in_value
        elif not _KEY_BEGINS.fullmatch(self._unread):
            raise MalformedToolCall(f"{_PARAMETER}{self._unread}")
        return bool(found)

    def _is_past_json(self) -> bool:
        """Reads an object or array up to its end: its strings may have tags in them."""
        if self._json_end is None:
            return True
        text = self._unread if self._value else self._unread.lstrip()
        if not text:
            return False
        if not self._value and text[0] not in "{[":
            self._json_end = None
            return True
        try:
            end = self._json_end.push(text)
        except InvalidJson as error:  # Python's, perhaps
            end = error.at
        self._value, self._unread = self._value + text[:end], "" if end is None else text[end:]
        self._json_end = None if end is not None else self._json_end
        return end is not None

    def _in_value(self) -> bool:
        if self._is_first_letter and self._unread:
            self._unread, self._is_first_letter = self._unread.removeprefix("\n"), False
        if not self._is_past_json():
            return False
        before, marker, rest = self._end.split(self._unread)
        held = "\n" if before.endswith("\n") else ""  # it may be the one before the closing tag
        before = before.removesuffix(held)
        if self._kinds == {"string"}:
            self._calls.arguments(dump_json(before)[1:-1])
        else:
            self._value += before
        if marker is None:
            self._unread = held + rest
            return False
        self._calls.arguments('"' if self._kinds == {"string"} else coerce_to_json(self._value, self._kinds))
        self._unread, self._step = rest, self._in_function
        return True
