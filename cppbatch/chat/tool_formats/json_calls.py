"""Tool calls that are JSON objects, `{"name": ..., "arguments": {...}}`: parsers and a grammar for several formats."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.scanning import InvalidJson, JsonValueScanner, dump_json, parse_json
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat

_NAMES = ("name", "tool_name")
_SEPARATORS = ",;"
_ARGUMENTS = ("arguments", "parameters")


class JsonCallParser:
    """Parses one call object. Emits the name as soon as it is known, and the arguments as their text arrives.

    Keys may come in any order, unknown keys are ignored, and the arguments may be an object inside a string.
    `known_only`: an object with a name that is not a tool's is not a call. `name_is_key`: the object is
    `{"name": {arguments}}`.
    """

    def __init__(self, calls: ToolCallEmitter, *, known_only: bool, name_is_key: bool = False) -> None:
        self._calls = calls
        self._known_only = known_only
        self._name_is_key = name_is_key
        self._unread = ""
        self._before_name = ""  # the text that was read until the name was known
        self._value = ""  # what was read of a value that is collected as a whole
        self._key = ""
        self._arguments: str | None = None
        self._named = self._ended = False
        self._scanner = JsonValueScanner()
        self._on_value: Callable[[str], None] = self._on_key
        self._step: Callable[[], bool] = self._open

    def push(self, text: str) -> str | None:
        self._unread += text
        try:
            while not self._ended and self._step():
                pass
        except ValueError:  # InvalidJson too
            raise MalformedToolCall((self._value if self._named else self._before_name) + self._unread) from None
        return self._unread if self._ended else None

    def _peek(self) -> str:
        """Skips white space. Returns the next character; "" if there is none yet."""
        text = self._unread.lstrip()
        self._take(len(self._unread) - len(text))
        return text[:1]

    def _take(self, n: int) -> str:
        taken, self._unread = self._unread[:n], self._unread[n:]
        if not self._named:
            self._before_name += taken
        return taken

    def _expect(self, characters: str) -> str:
        character = self._peek()
        if character and character not in characters:
            raise ValueError(character)
        return self._take(1) if character else ""

    def _open(self) -> bool:
        if self._expect("{"):
            self._step = self._member
        return self._step != self._open

    def _member(self) -> bool:
        character = self._peek()
        if character == '"':
            self._collect(self._on_key)
        elif character == "}":
            self._take(1)
            self._finish()
        elif character:
            raise ValueError(character)
        return bool(character)

    def _colon(self) -> bool:
        if not self._expect(":"):
            return False
        self._step = self._start_value
        return True

    def _start_value(self) -> bool:
        character = self._peek()
        if character == "{" and self._name_is_key and not self._named:
            self._start(self._key)
            self._key = _ARGUMENTS[0]
        if character == "{" and self._named and self._arguments is None and self._key in _ARGUMENTS:
            self._arguments, self._scanner, self._step = "", JsonValueScanner(), self._stream_arguments
        elif character:
            handlers = dict.fromkeys(_NAMES, self._on_name) | dict.fromkeys(_ARGUMENTS, self._on_arguments)
            handlers["function"] = self._on_function
            self._collect(handlers.get(self._key, lambda _: None))
        return bool(character)

    def _next_member(self) -> bool:
        character = self._peek()
        if character == ",":
            self._take(1)
            self._step = self._member
        elif character == "}":
            self._take(1)
            self._finish()
        elif character and self._arguments is not None and self._named:
            self._ended = True  # the model forgot the closing brace; the parser of the block judges the rest
        elif character:
            raise ValueError(character)
        return bool(character)

    def _stream_arguments(self) -> bool:
        try:
            end = self._scanner.push(self._unread)
        except InvalidJson as error:
            self._calls.arguments(self._take(error.at))
            raise
        self._calls.arguments(self._take(len(self._unread) if end is None else end))
        if end is not None:
            self._step = self._next_member
        return end is not None

    def _collect(self, on_value: Callable[[str], None]) -> None:
        self._value, self._scanner, self._on_value, self._step = "", JsonValueScanner(), on_value, self._collecting

    def _collecting(self) -> bool:
        end = self._scanner.push(self._unread)
        self._value += self._take(len(self._unread) if end is None else end)
        if end is not None:
            self._step = self._next_member
            self._on_value(self._value)
            self._value = ""
        return end is not None

    def _on_key(self, text: str) -> None:
        self._key, self._step = parse_json(text), self._colon

    def _on_name(self, text: str) -> None:
        if not self._named:
            self._start(parse_json(text))

    def _on_function(self, text: str) -> None:
        """`{"function": "name"}` or `{"function": {"name": ..., "arguments": ...}}`."""
        value = parse_json(text)
        if not self._named and isinstance(value, dict):
            inner: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
            self._arguments = _object_text(dump_json(inner))
            self._start(value.get("name"))
        elif not self._named:
            self._start(value)

    def _on_arguments(self, text: str) -> None:
        if self._arguments is not None:
            return
        self._arguments = _object_text(text)
        if self._named:
            self._calls.arguments(self._arguments)

    def _start(self, name: Any) -> None:
        if not isinstance(name, str) or not name or (self._known_only and name not in self._calls.tools):
            raise ValueError(name)
        self._named = True
        self._calls.start(name)
        self._calls.arguments(self._arguments or "")

    def _finish(self) -> None:
        if not self._named:
            raise ValueError("no name")
        if self._arguments is None:
            self._calls.arguments("{}")
        self._ended = True


def _object_text(text: str) -> str:
    """Returns the arguments as JSON text of an object. Raises `ValueError`."""
    value = parse_json(text)
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        text, value = value, parse_json(value)
    if not isinstance(value, dict):
        raise ValueError(text)
    return text


class JsonCallsParser:
    """Parses a sequence of call objects, with commas or semicolons in between, or a list of them.

    `end_marker`: ends the block. Without one, the block ends after a list, or before text that is neither an object
    nor a separator.
    """

    def __init__(
        self,
        calls: ToolCallEmitter,
        *,
        known_only: bool,
        end_marker: str = "",
        name_is_key: bool = False,
    ) -> None:
        self._calls = calls
        self._known_only = known_only
        self._name_is_key = name_is_key
        self._end_marker = end_marker
        self._unread = ""
        self._object: JsonCallParser | None = None
        self._n_objects = 0
        self._in_list = False

    def push(self, text: str) -> str | None:
        self._unread += text
        while True:
            if self._object is None:
                self._unread = self._unread.lstrip()
                rest_of_message = self._between_objects()
                if rest_of_message is not None:
                    return rest_of_message
            if self._object is None or not self._unread:
                return None
            rest = self._object.push(self._unread)
            self._unread = rest or ""
            if rest is not None:
                self._object = None

    def close(self) -> None:
        """Leaves an incomplete call as it was emitted."""

    def _between_objects(self) -> str | None:
        """Skips brackets and separators. Returns the text after the block if the block has ended."""
        while self._unread:
            text = self._unread
            if self._end_marker and self._end_marker.startswith(text[: len(self._end_marker)]):
                return text[len(self._end_marker) :] if text.startswith(self._end_marker) else None
            if text[0] == "{":
                self._object = JsonCallParser(self._calls, known_only=self._known_only, name_is_key=self._name_is_key)
                self._n_objects += 1
                return None
            if text[0] == "]" and self._in_list and not self._end_marker:
                return text[1:]
            if text[0] == "[" and not self._n_objects and not self._in_list:
                self._in_list = True
            elif text[0] == "]" and self._in_list:
                self._in_list = False
            elif not (text[0] in _SEPARATORS and self._n_objects):
                if self._n_objects and not self._end_marker and not self._in_list:
                    return text
                raise MalformedToolCall(text)
            self._unread = text[1:].lstrip()
        return None


def json_calls_grammar(lark: LarkGrammar, tools: ToolSchemas, *, key: str = "arguments") -> str:
    """Returns the expression of `{"name": ..., "arguments": ...}`, a call of one of the tools."""
    calls = []
    for name, schema in lark.each(tools):
        before = lark.literal('{"name": ' + dump_json(name) + f', "{key}": ')
        calls.append(f"{before} {lark.json(schema)} {lark.literal('}')}")
    return lark.one_of(calls)


_TAG = "<|python_tag|>"
_CALL = re.compile(r"\s*([\w\-]+)\.call\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r'\s*(\w+)\s*=\s*("(?:[^"\\]|\\.)*"\s*|[^,"\s][^,"]*)(?:,|$)', re.DOTALL)


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
        """Returns a parser of JSON calls, or of a built-in tool after its tag."""
        return _PythonTagParser(calls) if start == _TAG else JsonCallsParser(calls, known_only=True)

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        return lark.repeat(lark.rule(json_calls_grammar(lark, tools, key=self._arguments_key)), "; ", several=several)


class _PythonTagParser:
    """Parses the text from `<|python_tag|>` to the end of the message."""

    def __init__(self, calls: ToolCallEmitter) -> None:
        self._calls = calls
        self._unread = ""
        self._json: JsonCallsParser | None = None

    def push(self, text: str) -> str | None:
        """Reads JSON calls; keeps other text until the end."""
        self._unread += text
        if self._json is None and self._unread.lstrip()[:1] in ("{", "["):
            self._json = JsonCallsParser(self._calls, known_only=True)
        if self._json is None:
            return None
        text, self._unread = self._unread, ""
        return self._json.push(text)

    def close(self) -> None:
        """Completes the call of a built-in tool."""
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
