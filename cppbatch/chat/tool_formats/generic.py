"""Tools for models whose template knows none: told in plain words, called by JSON."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cppbatch.chat.json_text import dump_json, parse_json
from cppbatch.chat.tool_formats.json_calls import JsonCallParser, JsonCallsParser, json_calls_grammar
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat
from cppbatch.chat.tool_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.lark_grammar import LarkGrammar

Json = dict[str, Any]

_HOW = """You can call functions. These exist, each with the JSON schema of its arguments:
{functions}

To call functions, answer with nothing but JSON of this form:
{{"tool_calls": [{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}]}}
The results come with the next message. If no function helps, answer in words."""

_BEFORE, _AFTER = '{"tool_calls": [', "]}"
_WRAPPER = re.compile(r'\{\s*"tool_calls"\s*:\s*')
_WRITTEN_WRAPPER = '{"tool_calls":'
_FENCE = re.compile(r"```(json)?\s*(?=[{\[])")
_FENCE_BEGINS = re.compile(r"`{1,3}|```(j|js|jso|json)?\s*[{\[]?")


class GenericFormat(ToolCallFormat):
    """Models that were trained for no form of their own, or for one that is not known here."""

    name = "generic"
    start_prefixes = ("{", "[", "```")
    template_has_tools = False

    def calls(self, opening: str, calls: ToolCallEmitter) -> ToolParser:
        """As `ToolCallFormat.calls`."""
        return GenericToolParser(calls)

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        calls = lark.repeated(lark.rule(json_calls_grammar(lark, tools)), ", ", several=several)
        return f"{lark.text(_BEFORE)} {calls} {lark.text(_AFTER)}"


class GenericToolParser:
    """`{"tool_calls": [...]}`, or a call object or a list of such alone; perhaps fenced as code."""

    def __init__(self, calls: ToolCallEmitter) -> None:
        self._calls = calls
        self._unread = ""
        self._reader: JsonCallParser | JsonCallsParser | None = None
        self._closings: list[str] = []
        self._step: Callable[[], bool] = self._fence

    def push(self, text: str) -> str | None:
        """As `ToolParser.push`."""
        self._unread += text
        while self._unread:
            if self._step == self._after and not self._closings:
                return self._unread
            if not self._step():
                return None
        return "" if self._step == self._after and not self._closings else None

    def close(self) -> None:
        """What was told stays told."""

    def _fence(self) -> bool:
        if self._unread.startswith("`"):
            fence = _FENCE.match(self._unread)
            if fence is None or fence.end() == len(self._unread):
                if not _FENCE_BEGINS.fullmatch(self._unread):
                    raise MalformedToolCall(self._unread)
                return False
            self._unread, self._closings = self._unread[fence.end() :], ["```"]
        self._step = self._brackets
        return True

    def _brackets(self) -> bool:
        wrapper = _WRAPPER.match(self._unread)
        if wrapper is None and _WRITTEN_WRAPPER.startswith("".join(self._unread.split())):
            return False
        if wrapper:
            self._unread = self._unread[wrapper.end() :]
            self._closings.insert(0, "}")
        if wrapper or self._unread.startswith("["):
            self._reader = JsonCallsParser(self._calls, known_only=True)
        else:
            self._reader = JsonCallParser(self._calls, known_only=True)
        self._step = self._in_calls
        return True

    def _in_calls(self) -> bool:
        assert self._reader
        rest = self._reader.push(self._unread)
        self._unread = rest or ""
        if rest is not None:
            self._step = self._after
        return rest is not None

    def _after(self) -> bool:
        text = self._unread.lstrip()
        closing = self._closings[0]
        if closing.startswith(text[: len(closing)]) and len(text) < len(closing):
            return False
        self._unread = text.removeprefix(closing)
        self._closings.pop(0)
        return True


def describe_tools_in_text(messages: list[Json], tools: list[Json], *, has_system: bool = True) -> list[Json]:
    """The conversation for a template that knows no tools: they are explained in the system message, calls are what
    the assistant said, and results what the user said. Without `has_system` the first user message explains them.
    """
    plain: list[Json] = []
    names: dict[str, str] = {}
    told_results = False  # the last message is of results: what the user says next joins it, as roles must alternate
    for message in messages:
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id") or "", message.get("name"))
            text = (f"Result of {name}: " if name else "Result: ") + content_text(message)
            plain = _said_by_user(plain, text, joined=told_results)
            told_results = True
        elif message["role"] == "user" and told_results:
            plain = _said_by_user(plain, content_text(message), joined=True)
        elif message["role"] == "assistant" and message.get("tool_calls"):
            names |= {call.get("id") or "": call["function"]["name"] for call in message["tool_calls"]}
            plain.append({"role": "assistant", "content": _with_calls(message)})
            told_results = False
        else:
            plain.append(message)
            told_results = False
    return _explained(plain, tools, has_system=has_system) if tools else plain


def content_text(message: Json) -> str:
    """A message's content, the text of its parts one after the other."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def _said_by_user(messages: list[Json], text: str, *, joined: bool) -> list[Json]:
    if not joined:
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']}\n{text}"}]


def _with_calls(message: Json) -> str:
    """What the assistant said, and its calls in the form that they must have."""
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # else as the client wrote them
                arguments = parse_json(arguments)
        calls.append({"name": call["function"]["name"], "arguments": arguments})
    said = content_text(message)
    return (said and said + "\n") + dump_json({"tool_calls": calls})


def _explained(messages: list[Json], tools: list[Json], *, has_system: bool) -> list[Json]:
    functions = "\n".join(dump_json({"parameters": {}} | tool["function"]) for tool in tools)
    how = _HOW.format(functions=functions)
    role = "system" if has_system else "user"
    for i, message in enumerate(messages):
        if message["role"] == role or (has_system and i == 0 and message["role"] == "developer"):
            both = [content_text(message), how] if has_system else [how, content_text(message)]
            changed = message | {"content": "\n\n".join(text for text in both if text)}
            return [*messages[:i], changed, *messages[i + 1 :]]
    return [{"role": role, "content": how}, *messages]
