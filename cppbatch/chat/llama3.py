"""Llama 3.1 to 3.3: a bare JSON object instead of an answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cppbatch.chat.calls import CallReader, Calls, Malformed, Tools
from cppbatch.chat.family import Family
from cppbatch.chat.json_calls import JsonCalls, write_json_calls
from cppbatch.chat.json_text import dumped, parsed

if TYPE_CHECKING:
    from cppbatch.chat.lark import Lark

_TAG = "<|python_tag|>"
_CALL = re.compile(r"\s*([\w\-]+)\.call\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r'\s*(\w+)\s*=\s*("(?:[^"\\]|\\.)*"|[^,"]+)\s*(?:,|$)', re.DOTALL)


class Llama3(Family):
    """`{"name": ..., "parameters": {...}}` as the whole message, several with `;` or a new line between them.

    Behind `<|python_tag|>` there may be such, or a call of a built-in tool: `brave_search.call(query="...")`. JSON
    whose name is none of the tools is text. The templates take one call a message, so no more are enforced.
    """

    name = "llama3"
    markers = (_TAG,)
    openings = (_TAG,)
    leads = ("{", "[")
    several_calls = False

    def calls(self, opening: str, calls: Calls) -> CallReader:
        """As `Family.calls`."""
        return _PythonTag(calls) if opening == _TAG else JsonCalls(calls, known_only=True)

    def write_calls(self, lark: Lark, tools: Tools, *, several: bool) -> str:
        """As `Family.write_calls`."""
        return lark.repeated(lark.rule(write_json_calls(lark, tools, key="parameters")), "; ", several=several)


class _PythonTag:
    """What follows the tag, up to the end of the message."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._unread = ""
        self._json: JsonCalls | None = None

    def push(self, text: str) -> str | None:
        """As `CallReader.push`."""
        self._unread += text
        if self._json is None and self._unread.lstrip()[:1] in ("{", "["):
            self._json = JsonCalls(self._calls, known_only=True)
        if self._json is None:
            return None
        text, self._unread = self._unread, ""
        return self._json.push(text)

    def close(self) -> None:
        """As `CallReader.close`: only now it is certain that the call is whole."""
        if self._json:
            return
        found = _CALL.fullmatch(self._unread)
        arguments = _keywords(found[2]) if found else None
        if not found or arguments is None or found[1] not in self._calls.tools:
            raise Malformed(self._unread)
        self._calls.start(found[1])
        self._calls.arguments(dumped(arguments))


def _keywords(text: str) -> dict[str, object] | None:
    """`a="b", c=1` as an object; None if it is something else."""
    arguments: dict[str, object] = {}
    at = 0
    while at < len(text.rstrip()):
        found = _ARGUMENT.match(text, at)
        if found is None:
            return None
        at = found.end()
        try:
            arguments[found[1]] = parsed(found[2].strip())
        except ValueError:
            arguments[found[1]] = found[2].strip().strip("'\"")
    return arguments
