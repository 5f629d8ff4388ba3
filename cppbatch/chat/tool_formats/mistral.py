"""Mistral: a JSON list (Nemo), or a name followed by its arguments (Small 3.2, Devstral, Ministral 3)."""

from __future__ import annotations

import re

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.scanning import InvalidJson, JsonValueScanner, dump_json
from cppbatch.chat.tool_formats.json_calls import JsonCallsParser
from cppbatch.chat.tool_formats.tool_format import FUNCTION_NAME, ToolCallFormat, random_alphanumerics

_CALLS, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_JSON_ID_BEFORE, _JSON_ID_AFTER = ', "id": "', '"'
_HEAD = re.compile(rf"\s*({FUNCTION_NAME.pattern})\s*(?:\[CALL_ID\]\s*([a-zA-Z0-9]*)\s*)?(?:\[ARGS\]\s*)?(?=\{{)")
_ID_LENGTH = 9


class MistralFormat(ToolCallFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    Both forms are parsed. `source`: the chat template, which shows the form that this model writes.
    """

    name = "mistral"
    markers = (_CALLS, _ARGUMENTS, _ID)
    start_markers = (_CALLS,)

    def __init__(self, source: str) -> None:
        self._name_first = _ARGUMENTS in source
        self._has_ids = _ID in source

    def new_call_id(self) -> str:
        """As `ToolCallFormat.new_call_id`: nine letters and digits, the only form that the templates accept."""
        return random_alphanumerics(_ID_LENGTH)

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.tool_parser`."""
        return _MistralToolParser(calls)

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        id_ = lark.terminal(f"/[a-zA-Z0-9]{{{_ID_LENGTH}}}/")
        calls = []
        for name, schema in tools.items():
            if self._name_first:
                with_id = f"({lark.literal(_ID)} {id_})?" if self._has_ids else ""
                calls.append(f"{lark.literal(_CALLS + name)} {with_id} {lark.literal(_ARGUMENTS)} {lark.json(schema)}")
            else:
                before = lark.literal('{"name": ' + dump_json(name) + ', "arguments": ')
                with_id = f"({lark.literal(_JSON_ID_BEFORE)} {id_} {lark.literal(_JSON_ID_AFTER)})?"
                calls.append(f"{before} {lark.json(schema)} {with_id} {lark.literal('}')}")
        call = lark.rule(lark.one_of(calls))
        if self._name_first:
            return lark.repeated(call, "", several=several)
        return f"{lark.literal(_CALLS + '[')} {lark.repeated(call, ', ', several=several)} {lark.literal(']')}"


class _MistralToolParser:
    """Parses the text after `[TOOL_CALLS]`."""

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
        """As `ToolParser.close`. An incomplete call stays as it was emitted."""

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
    """Whether the text is a prefix of a name, an id and their markers."""
    name = FUNCTION_NAME.match(text)
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
