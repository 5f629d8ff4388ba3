"""Tools for models whose template does not render them: described in a message, called with JSON."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.scanning import dump_json, parse_json
from cppbatch.chat.template import content_text
from cppbatch.chat.tool_formats.json_calls import JsonCallParser, JsonCallsParser, json_calls_grammar
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat

Json = dict[str, Any]

_INSTRUCTIONS = """You can call functions. These exist, each with the JSON schema of its arguments:
{functions}

To call functions, answer with nothing but {form}
The results come with the next message. If no function helps, answer in words."""

_EXAMPLE = {"name": "the function's name", "arguments": {"an argument's name": "its value"}}
_JSON_FORM = f"JSON of this form:\n{dump_json({'tool_calls': [_EXAMPLE]})}"

_BEFORE, _AFTER = '{"tool_calls": [', "]}"
_WRAPPER = re.compile(r'\{\s*"tool_calls"\s*:\s*')
_WRITTEN_WRAPPER = '{"tool_calls":'
_FENCE = re.compile(r"```(json)?\s*(?=[{\[])")
_FENCE_PREFIX = re.compile(r"`{1,3}|```(j|js|jso|json)?\s*[{\[]?")


class GenericFormat(ToolCallFormat):
    """For models without a format of their own, or with an unknown one."""

    name = "generic"
    example = '{"tool_calls": [{"name": "NAME", "arguments": {"KEY": "VALUE"}}]}'
    start_prefixes = ("{", "[", "```")
    template_has_tools = False

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        return GenericToolParser(calls)

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        calls = lark.repeat(lark.rule(json_calls_grammar(lark, tools)), ", ", several=several)
        return f"{lark.literal(_BEFORE)} {calls} {lark.literal(_AFTER)}"


class GenericToolParser:
    """Parses `{"tool_calls": [...]}`, a call object or a list of them, perhaps in a code fence."""

    def __init__(self, calls: ToolCallEmitter) -> None:
        self._calls = calls
        self._unread = ""
        self._parser: JsonCallParser | JsonCallsParser | None = None
        self._closings: list[str] = []
        self._step: Callable[[], bool] = self._fence

    def push(self, text: str) -> str | None:
        """Returns the text after the calls and their code fence."""
        self._unread += text
        while self._unread:
            if self._step == self._after and not self._closings:
                return self._unread
            if not self._step():
                return None
        return "" if self._step == self._after and not self._closings else None

    def close(self) -> None:
        """Leaves an incomplete call as it was emitted."""

    def _fence(self) -> bool:
        if self._unread.startswith("`"):
            fence = _FENCE.match(self._unread)
            if fence is None or fence.end() == len(self._unread):
                if not _FENCE_PREFIX.fullmatch(self._unread):
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
            self._parser = JsonCallsParser(self._calls, known_only=True)
        else:
            self._parser = JsonCallParser(self._calls, known_only=True)
        self._step = self._in_calls
        return True

    def _in_calls(self) -> bool:
        assert self._parser
        rest = self._parser.push(self._unread)
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


def describe_tools_in_text(
    messages: list[Json],
    tools: list[Json],
    *,
    in_user_message: bool = False,
    form: Callable[[list[Json]], str] | None = None,
) -> list[Json]:
    """Converts a conversation with tools for a template that does not render them.

    The system message describes the tools; with `in_user_message` the first user message does. Calls become the
    assistant's text, and their results become user messages. `form`: writes calls as this template renders them, so
    calls and results stay as they are.
    """
    if form:
        example = "this form, several in a row if needed:\n" + form([{"function": _EXAMPLE}])
        return _add_instructions(messages, tools, example, in_user_message=in_user_message) if tools else messages
    plain: list[Json] = []
    names: dict[str, str] = {}
    after_results = False  # the last message is of results: the next user message is appended, as roles must alternate
    for message in messages:
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id") or "", message.get("name"))
            text = (f"Result of {name}: " if name else "Result: ") + content_text(message)
            plain = _add_user_text(plain, text, append=after_results)
            after_results = True
        elif message["role"] == "user" and after_results:
            plain = _add_user_text(plain, content_text(message), append=True)
        elif message["role"] == "assistant" and message.get("tool_calls"):
            names |= {call.get("id") or "": call["function"]["name"] for call in message["tool_calls"]}
            plain.append({"role": "assistant", "content": _calls_as_text(message)})
            after_results = False
        else:
            plain.append(message)
            after_results = False
    return _add_instructions(plain, tools, _JSON_FORM, in_user_message=in_user_message) if tools else plain


def _add_user_text(messages: list[Json], text: str, *, append: bool) -> list[Json]:
    """`append`: to the last message."""
    if not append:
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']}\n{text}"}]


def _calls_as_text(message: Json) -> str:
    """The message's text and its calls, in the form that the instructions demand."""
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # otherwise as the client wrote them
                arguments = parse_json(arguments)
        calls.append({"name": call["function"]["name"], "arguments": arguments})
    text = content_text(message)
    return (text and text + "\n") + dump_json({"tool_calls": calls})


def _add_instructions(messages: list[Json], tools: list[Json], form: str, *, in_user_message: bool) -> list[Json]:
    functions = "\n".join(dump_json({"parameters": {}} | tool["function"]) for tool in tools)
    instructions = _INSTRUCTIONS.format(functions=functions, form=form)
    role = "user" if in_user_message else "system"
    for i, message in enumerate(messages):
        if message["role"] == role or (not in_user_message and i == 0 and message["role"] == "developer"):
            text = content_text(message)
            both = [instructions, text] if in_user_message else [text, instructions]
            changed = message | {"content": "\n\n".join(part for part in both if part)}
            return [*messages[:i], changed, *messages[i + 1 :]]
    return [{"role": role, "content": instructions}, *messages]
