"""Mistral's models: lists of JSON (Nemo), or the name in front of its arguments (Small 3.2, Devstral, Ministral 3)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cppbatch.chat.calls import NAME, CallReader, Calls, Malformed, Tools
from cppbatch.chat.family import Family, random_letters
from cppbatch.chat.json_calls import JsonCalls
from cppbatch.chat.json_text import JsonEnd, NotJson, dumped

if TYPE_CHECKING:
    from cppbatch.chat.lark import Lark

_CALLS, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(rf"\s*({NAME.pattern})\s*(?:\[CALL_ID\]\s*([a-zA-Z0-9]*)\s*)?(?:\[ARGS\]\s*)?(?=\{{)")
_ID_LENGTH = 9


class Mistral(Family):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    Both are read. `source`: the template, which shows the form that this model writes.
    """

    name = "mistral"
    markers = (_CALLS, _ARGUMENTS, _ID)
    openings = (_CALLS,)

    def __init__(self, source: str) -> None:
        self._names_first = _ARGUMENTS in source
        self._has_ids = _ID in source

    def new_id(self) -> str:
        """Nine letters and digits: the templates refuse anything else."""
        return random_letters(_ID_LENGTH)

    def calls(self, opening: str, calls: Calls) -> CallReader:
        """As `Family.calls`."""
        return _MistralCalls(calls)

    def write_calls(self, lark: Lark, tools: Tools, *, several: bool) -> str:
        """As `Family.write_calls`."""
        id_ = lark.terminal(f"/[a-zA-Z0-9]{{{_ID_LENGTH}}}/")
        calls = []
        for name, schema in tools.items():
            if self._names_first:
                with_id = f"({lark.text(_ID)} {id_})?" if self._has_ids else ""
                calls.append(f"{lark.text(_CALLS + name)} {with_id} {lark.text(_ARGUMENTS)} {lark.json(schema)}")
            else:
                before = lark.text('{"name": ' + dumped(name) + ', "arguments": ')
                with_id = f"({lark.text(_KEY_ID)} {id_} {lark.text(_QUOTE)})?"
                calls.append(f"{before} {lark.json(schema)} {with_id} {lark.text('}')}")
        call = lark.rule(lark.one_of(calls))
        if self._names_first:
            return lark.repeated(call, "", several=several)
        return f"{lark.text(_CALLS + '[')} {lark.repeated(call, ', ', several=several)} {lark.text(']')}"


_KEY_ID, _QUOTE = ', "id": "', '"'


class _MistralCalls:
    """What follows `[TOOL_CALLS]`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._unread = ""
        self._list: JsonCalls | None = None
        self._arguments: JsonEnd | None = None

    def push(self, text: str) -> str | None:
        """As `CallReader.push`."""
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
        except NotJson as error:
            self._calls.arguments(self._unread[: error.at])
            raise Malformed(self._unread[error.at :]) from None
        self._calls.arguments(self._unread[:end])
        self._unread = "" if end is None else self._unread[end:]
        return None if end is None else self._unread

    def close(self) -> None:
        """What was told stays told."""

    def _begin(self) -> bool:
        text = self._unread.lstrip()
        if text[:1] in ("[", "{"):
            self._list = JsonCalls(self._calls, known_only=False)
            return True
        head = _HEAD.match(text)
        if head:
            self._calls.start(head[1], head[2] if head[2] and len(head[2]) == _ID_LENGTH else None)
            self._unread, self._arguments = text[head.end() :], JsonEnd()
            return True
        if not _may_become_head(text):
            raise Malformed(text)
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
