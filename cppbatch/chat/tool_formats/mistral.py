"""Mistral's models: lists of JSON (Nemo), or the name in front of its arguments (Small 3.2, Devstral, Ministral 3)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cppbatch.chat.json_text import InvalidJson, JsonValueScanner, dump_json
from cppbatch.chat.tool_formats.json_calls import JsonCallsParser
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat, random_alphanumerics
from cppbatch.chat.tool_parser import NAME, MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.lark_grammar import LarkGrammar

_CALLS, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(rf"\s*({NAME.pattern})\s*(?:\[CALL_ID\]\s*([a-zA-Z0-9]*)\s*)?(?:\[ARGS\]\s*)?(?=\{{)")
_ID_LENGTH = 9


class MistralFormat(ToolCallFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    Both are read. `source`: the template, which shows the form that this model writes.
    """

    name = "mistral"
    markers = (_CALLS, _ARGUMENTS, _ID)
    start_markers = (_CALLS,)

    def __init__(self, source: str) -> None:
        self._names_first = _ARGUMENTS in source
        self._has_ids = _ID in source

    def new_call_id(self) -> str:
        """Nine letters and digits: the templates refuse anything else."""
        return random_alphanumerics(_ID_LENGTH)

    def calls(self, opening: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.calls`."""
        return _MistralToolParser(calls)

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        id_ = lark.terminal(f"/[a-zA-Z0-9]{{{_ID_LENGTH}}}/")
        calls = []
        for name, schema in tools.items():
            if self._names_first:
                with_id = f"({lark.text(_ID)} {id_})?" if self._has_ids else ""
                calls.append(f"{lark.text(_CALLS + name)} {with_id} {lark.text(_ARGUMENTS)} {lark.json(schema)}")
            else:
                before = lark.text('{"name": ' + dump_json(name) + ', "arguments": ')
                with_id = f"({lark.text(_KEY_ID)} {id_} {lark.text(_QUOTE)})?"
                calls.append(f"{before} {lark.json(schema)} {with_id} {lark.text('}')}")
        call = lark.rule(lark.one_of(calls))
        if self._names_first:
            return lark.repeated(call, "", several=several)
        return f"{lark.text(_CALLS + '[')} {lark.repeated(call, ', ', several=several)} {lark.text(']')}"


_KEY_ID, _QUOTE = ', "id": "', '"'


class _MistralToolParser:
    """What follows `[TOOL_CALLS]`."""

    def __init__(self, calls: ToolCallEmitter) -> None:
        self._calls = calls
        self._unread = ""
        self._list: JsonCallsParser | None = None
        self._arguments: JsonValueScanner | None = None

    def push(self, text: str) -> str | None:
        """As `ToolParser.push`."""
        if self._list:
            return self._list.push(text)
        self._unread += text
        if self._arguments is None and not self._begin():
            return None
        if self._list:
            return self._list.push(self._unread)
        assert self._arguments
        try:
            end = self._arguments.push(self._unread)
        except InvalidJson as error:
            self._calls.arguments(self._unread[: error.at])
            raise MalformedToolCall(self._unread[error.at :]) from None
        self._calls.arguments(self._unread[:end])
        self._unread = "" if end is None else self._unread[end:]
        return None if end is None else self._unread

    def close(self) -> None:
        """What was told stays told."""

    def _begin(self) -> bool:
        text = self._unread.lstrip()
        if text[:1] in ("[", "{"):
            self._list = JsonCallsParser(self._calls, known_only=False)
            return True
        head = _HEAD.match(text)
        if head:
            self._calls.start(head[1], head[2] if head[2] and len(head[2]) == _ID_LENGTH else None)
            self._unread, self._arguments = text[head.end() :], JsonValueScanner()
            return True
        if not _may_become_head(text):
            raise MalformedToolCall(text)
        return False


def _may_become_head(text: str) -> bool:
    """Whether this is the beginning of a name, an id and what marks them."""
    name = NAME.match(text)
    if name is None:
        return not text
    rest = text[name.end() :].lstrip()
    if rest.startswith(_ID):
        rest = rest[len(_ID) :].lstrip()
        rest = re.sub(r"^[a-zA-Z0-9]+\s*", "", rest)
    elif _ID.startswith(rest):
        return True
    if rest.startswith(_ARGUMENTS):
        return not rest[len(_ARGUMENTS) :].strip()
    return _ARGUMENTS.startswith(rest)
