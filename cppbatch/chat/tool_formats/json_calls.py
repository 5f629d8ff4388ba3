"""Reads calls that are JSON objects, `{"name": ..., "arguments": {...}}`, as they grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cppbatch.chat.json_text import InvalidJson, JsonValueScanner, dump_json, parse_json
from cppbatch.chat.tool_parser import MalformedToolCall, ToolCallEmitter, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.lark_grammar import LarkGrammar

_ARGUMENTS = ("arguments", "parameters")


class JsonCallParser:
    """One call. Its name is told as soon as it is known, the arguments as their text comes.

    Keys may come in any order, others are passed over, and arguments may be an object within a string.
    `known_only`: an object whose name is none of the tools is no call.
    """

    def __init__(self, calls: ToolCallEmitter, *, known_only: bool) -> None:
        self._calls = calls
        self._known_only = known_only
        self._unread = ""
        self._untold = ""  # what was read while the name is not known
        self._value = ""  # what was read of a value that is wanted whole
        self._key = ""
        self._arguments: str | None = None
        self._named = self._ended = False
        self._end = JsonValueScanner()
        self._then: Callable[[str], None] = self._on_key
        self._step: Callable[[], bool] = self._open

    def push(self, text: str) -> str | None:
        """As `ToolParser.push`."""
        self._unread += text
        try:
            while not self._ended and self._step():
                pass
        except ValueError:  # NotJson too
            raise MalformedToolCall((self._value if self._named else self._untold) + self._unread) from None
        return self._unread if self._ended else None

    def _letter(self) -> str:
        """The next one that is no space, "" if there is none yet."""
        text = self._unread.lstrip()
        self._take(len(self._unread) - len(text))
        return text[:1]

    def _take(self, n: int) -> str:
        taken, self._unread = self._unread[:n], self._unread[n:]
        if not self._named:
            self._untold += taken
        return taken

    def _expect(self, letters: str) -> str:
        letter = self._letter()
        if letter and letter not in letters:
            raise ValueError(letter)
        return self._take(1) if letter else ""

    def _open(self) -> bool:
        if self._expect("{"):
            self._step = self._member
        return self._step != self._open

    def _member(self) -> bool:
        letter = self._letter()
        if letter == '"':
            self._collect(self._on_key)
        elif letter == "}":
            self._take(1)
            self._finish()
        elif letter:
            raise ValueError(letter)
        return bool(letter)

    def _colon(self) -> bool:
        if not self._expect(":"):
            return False
        self._step = self._value_begins
        return True

    def _value_begins(self) -> bool:
        letter = self._letter()
        if letter == "{" and self._named and self._arguments is None and self._key in _ARGUMENTS:
            self._arguments, self._end, self._step = "", JsonValueScanner(), self._stream
        elif letter:
            wanted = {"name": self._on_name, "function": self._on_function}
            wanted |= dict.fromkeys(_ARGUMENTS, self._on_arguments)
            self._collect(wanted.get(self._key, lambda _: None))
        return bool(letter)

    def _next_member(self) -> bool:
        letter = self._letter()
        if letter == ",":
            self._take(1)
            self._step = self._member
        elif letter == "}":
            self._take(1)
            self._finish()
        elif letter and self._arguments is not None and self._named:
            self._ended = True  # a brace forgotten; whoever reads what is around the object may know better
        elif letter:
            raise ValueError(letter)
        return bool(letter)

    def _stream(self) -> bool:
        try:
            end = self._end.push(self._unread)
        except InvalidJson as error:
            self._calls.arguments(self._take(error.at))
            raise
        self._calls.arguments(self._take(len(self._unread) if end is None else end))
        if end is not None:
            self._step = self._next_member
        return end is not None

    def _collect(self, then: Callable[[str], None]) -> None:
        self._value, self._end, self._then, self._step = "", JsonValueScanner(), then, self._collecting

    def _collecting(self) -> bool:
        end = self._end.push(self._unread)
        self._value += self._take(len(self._unread) if end is None else end)
        if end is not None:
            self._step = self._next_member
            self._then(self._value)
            self._value = ""
        return end is not None

    def _on_key(self, text: str) -> None:
        self._key, self._step = parse_json(text), self._colon

    def _on_name(self, text: str) -> None:
        if not self._named:
            self._name(parse_json(text))

    def _on_function(self, text: str) -> None:
        """`{"function": "name"}` or `{"function": {"name": ..., "arguments": ...}}`."""
        value = parse_json(text)
        if not self._named and isinstance(value, dict):
            inner: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
            self._arguments = _object_text(dump_json(inner))
            self._name(value.get("name"))
        elif not self._named:
            self._name(value)

    def _on_arguments(self, text: str) -> None:
        if self._arguments is not None:
            return
        self._arguments = _object_text(text)
        if self._named:
            self._calls.arguments(self._arguments)

    def _name(self, name: Any) -> None:
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
    """Arguments as the JSON text of an object. Raises `ValueError`."""
    value = parse_json(text)
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        text, value = value, parse_json(value)
    if not isinstance(value, dict):
        raise ValueError(text)
    return text


class JsonCallsParser:
    """Call objects one after the other, with `separators` between them, or lists of such.

    `closing`: what ends the block. Without it, it ends with a list's end or with what is neither object nor separator.
    """

    def __init__(self, calls: ToolCallEmitter, *, known_only: bool, closing: str = "", separators: str = ",;") -> None:
        self._calls = calls
        self._known_only = known_only
        self._closing = closing
        self._separators = separators
        self._unread = ""
        self._object: JsonCallParser | None = None
        self._n_objects = 0
        self._in_list = False

    def push(self, text: str) -> str | None:
        """As `ToolParser.push`."""
        self._unread += text
        while True:
            if self._object is None:
                self._unread = self._unread.lstrip()
                ended = self._between()
                if ended is not None:
                    return ended
            if self._object is None or not self._unread:
                return None
            rest = self._object.push(self._unread)
            self._unread = rest or ""
            if rest is not None:
                self._object = None

    def close(self) -> None:
        """What was told stays told."""

    def _between(self) -> str | None:
        """Passes over what stands between objects; what is left when the block has ended."""
        while self._unread:
            text = self._unread
            if self._closing and self._closing.startswith(text[: len(self._closing)]):
                return text[len(self._closing) :] if text.startswith(self._closing) else None
            if text[0] == "{":
                self._object = JsonCallParser(self._calls, known_only=self._known_only)
                self._n_objects += 1
                return None
            if text[0] == "]" and self._in_list and not self._closing:
                return text[1:]
            if text[0] == "[" and not self._n_objects and not self._in_list:
                self._in_list = True
            elif text[0] == "]" and self._in_list:
                self._in_list = False
            elif not (text[0] in self._separators and self._n_objects):
                if self._n_objects and not self._closing and not self._in_list:
                    return text
                raise MalformedToolCall(text)
            self._unread = text[1:].lstrip()
        return None


def json_calls_grammar(lark: LarkGrammar, tools: ToolSchemas, *, key: str = "arguments") -> str:
    """The expression for `{"name": ..., "arguments": ...}`, a call of any of the tools."""
    calls = []
    for name, schema in tools.items():
        before = lark.text('{"name": ' + dump_json(name) + f', "{key}": ')
        calls.append(f"{before} {lark.json(schema)} {lark.text('}')}")
    return lark.one_of(calls)
