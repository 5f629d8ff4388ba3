"""Tool calls between `<tool_call>` tags: JSON, or a tag for each argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.scanning import InvalidJson, JsonValueScanner, MarkerFinder, dump_json
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
from cppbatch.chat.tool_formats.tool_format import FUNCTION_NAME, ToolCallFormat

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_NAME = re.compile(rf"({FUNCTION_NAME.pattern})>")
_NAME_PREFIX = re.compile(rf"({FUNCTION_NAME.pattern})?")
_KEY = re.compile(r"([^<>\n]{1,256})>")
_KEY_PREFIX = re.compile(r"[^<>\n]{0,256}")


class HermesFormat(ToolCallFormat):
    """Hermes, Qwen 2.5, Qwen 3, Granite 4 and many others.

    `<tool_call>`, `{"name": ..., "arguments": {...}}`, `</tool_call>`, each on a line of its own.
    """

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    start_markers = ("<tool_call>",)

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.tool_parser`."""
        return JsonCallsParser(calls, known_only=False, end_marker="</tool_call>")

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        before, after = lark.literal("<tool_call>\n"), lark.literal("\n</tool_call>")
        call = f"{before} {json_calls_grammar(lark, tools)} {after}"
        return lark.repeated(lark.rule(call), "\n", several=several)


class QwenXmlFormat(ToolCallFormat):
    """Qwen 3 Coder, Qwen 3.5, Nemotron 3, Seed-OSS.

    `<tool_call>`, `<function=name>`, `<parameter=key>` and a value for each argument. The tool's schema determines the
    types of the values. JSON between the tags is parsed too. The grammar demands JSON for schemas that cannot be
    enforced without it.
    """

    name = "qwen_xml"

    def __init__(self, tag: str = "tool_call") -> None:
        self._tag = f"<{tag}>"
        self._end_tag = f"</{tag}>"
        self.markers = self._tag, self._end_tag
        self.start_markers = self._tag, _FUNCTION  # models sometimes forget the first

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.tool_parser`."""
        parser = _XmlToolParser(calls, self._end_tag)
        if start == _FUNCTION:
            parser.push(start)
        return parser

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        calls, new_line = [], lark.literal("\n")
        for name, schema in tools.items():
            try:
                calls.append(self._call_grammar(lark, name, schema))
            except UnsupportedSchema:
                calls.append(f"{json_calls_grammar(lark, {name: schema})} {new_line}")
        before, after = lark.literal(self._tag + "\n"), lark.literal(self._end_tag)
        return lark.repeated(lark.rule(f"{before} {lark.one_of(calls)} {after}"), "\n", several=several)

    def _call_grammar(self, lark: LarkGrammar, name: str, schema: Any) -> str:
        parts = [lark.literal(f"{_FUNCTION}{name}>\n")]
        for key, given, required in object_members(schema):
            if not _KEY_PREFIX.fullmatch(key) or not key:
                raise UnsupportedSchema
            value = self._value_grammar(lark, given, schema)
            parameter = lark.literal(f"{_PARAMETER}{key}>\n") + f" {value}"
            parts.append(parameter if required else f"({parameter})?")
        return " ".join([*parts, lark.literal(f"{_FUNCTION_END}\n")])

    def _value_grammar(self, lark: LarkGrammar, given: Any, root: Any) -> str:
        """Returns the expression of a value and the end of its tag. Raises `UnsupportedSchema`."""
        ending = f"\n{_PARAMETER_END}\n"
        types, schema = json_types(given, root), resolve_ref(given, root)
        if types == {"string", "null"}:  # the word null is null, any other text is a string
            strings = [part for part in schema_variants(given, root) if part.get("type") != "null"]
            if any((string_lengths(part), enum_values(part)) != ((0, None), None) for part in strings):
                raise UnsupportedSchema
            return lark.text_until(_PARAMETER_END, ending=ending)
        if types == {"string"}:
            if (listed := enum_values(schema)) is not None:
                if any(not isinstance(one, str) or one != one.strip() or _PARAMETER_END in one for one in listed):
                    raise UnsupportedSchema
                return f"{lark.one_of([lark.literal(one) for one in listed])} {lark.literal(ending)}"
            min_length, max_length = string_lengths(schema)
            return lark.text_until(_PARAMETER_END, ending=ending, min_length=min_length, max_length=max_length)
        if not types or "string" in types:  # without quotes a string looks like other values
            raise UnsupportedSchema
        return f"{lark.json(standalone_schema(given, root))} {lark.literal(ending)}"


class _XmlToolParser:
    """Parses the text after `<tool_call>`."""

    def __init__(self, calls: ToolCallEmitter, end_tag: str) -> None:
        self._calls = calls
        self._end_tag = end_tag
        self._function_markers = MarkerFinder([end_tag, _FUNCTION])
        self._argument_markers = MarkerFinder([end_tag, _PARAMETER, _FUNCTION_END, _FUNCTION])
        self._unread = ""
        self._json: JsonCallsParser | None = None
        self._schema: Any = {}
        self._types: frozenset[str] = frozenset()
        self._n_arguments = 0
        self._n_functions = 0
        self._value = ""  # what was read of a value that is not a string
        self._scanner: JsonValueScanner | None = None
        self._at_value_start = False
        self._parameter_end = MarkerFinder([_PARAMETER_END])
        self._step: Callable[[], bool] = self._between_functions
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
        """As `ToolParser.close`. An incomplete call stays as it was emitted."""

    def _between_functions(self) -> bool:
        """Before or after a function."""
        text = self._unread = self._unread.lstrip()
        if not text:
            return False
        if text[0] in "{[" and not self._n_functions:
            self._json = JsonCallsParser(self._calls, known_only=False, end_marker=self._end_tag)
            return False
        marker = self._function_markers.at_start(text)
        if marker is None and self._n_functions:
            self._rest = text
        elif marker is None:
            raise MalformedToolCall(text)
        elif marker == self._end_tag:
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
        elif not _NAME_PREFIX.fullmatch(self._unread):
            raise MalformedToolCall(f"{_FUNCTION}{self._unread}")
        return bool(found)

    def _in_function(self) -> bool:
        """Before or after an argument."""
        text = self._unread = self._unread.lstrip()
        marker = self._argument_markers.at_start(text) if text else ""
        if marker == _PARAMETER:
            self._unread, self._step = text[len(marker) :], self._in_key
        elif marker == "":
            return False
        else:  # any other text ends the function
            self._calls.arguments("}" if self._n_arguments else "{}")
            self._unread = text.removeprefix(_FUNCTION_END)
            self._step = self._between_functions
        return True

    def _in_key(self) -> bool:
        found = _KEY.match(self._unread)
        if found:
            key = found[1].strip()
            properties = self._schema.get("properties") or {}
            self._types = json_types(properties.get(key, {}), self._schema)
            self._calls.arguments(f"{', ' if self._n_arguments else '{'}{dump_json(key)}: ")
            self._calls.arguments('"' if self._types == {"string"} else "")
            self._n_arguments += 1
            self._unread, self._value, self._at_value_start = self._unread[found.end() :], "", True
            self._scanner = None if "string" in self._types else JsonValueScanner()
            self._step = self._in_value
        elif not _KEY_PREFIX.fullmatch(self._unread):
            raise MalformedToolCall(f"{_PARAMETER}{self._unread}")
        return bool(found)

    def _skip_json(self) -> bool:
        """Reads an object or array to its end, since its strings may contain tags. False: more text is needed."""
        if self._scanner is None:
            return True
        text = self._unread if self._value else self._unread.lstrip()
        if not text:
            return False
        if not self._value and text[0] not in "{[":
            self._scanner = None
            return True
        try:
            end = self._scanner.push(text)
        except InvalidJson as error:  # perhaps a Python literal
            end = error.at
        self._value, self._unread = self._value + text[:end], "" if end is None else text[end:]
        self._scanner = None if end is not None else self._scanner
        return end is not None

    def _in_value(self) -> bool:
        if self._at_value_start and self._unread:
            self._unread, self._at_value_start = self._unread.removeprefix("\n"), False
        if not self._skip_json():
            return False
        before, marker, rest = self._parameter_end.split(self._unread)
        held = "\n" if before.endswith("\n") else ""  # may be the one before the end tag
        before = before.removesuffix(held)
        if self._types == {"string"}:
            self._calls.arguments(dump_json(before)[1:-1])
        else:
            self._value += before
        if marker is None:
            self._unread = held + rest
            return False
        self._calls.arguments('"' if self._types == {"string"} else coerce_to_json(self._value, self._types))
        self._unread, self._step = rest, self._in_function
        return True
