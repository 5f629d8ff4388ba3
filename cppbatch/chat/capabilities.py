"""Detecting what a chat template supports by rendering short conversations.

Templates differ and do not declare their capabilities. Each probe contains words that occur nowhere else and checks
where the template writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

ChatMessage = dict[str, Any]
Render = Callable[[list[ChatMessage], list[dict[str, Any]] | None], str | None]
"""Renders messages and tools; None: the template refuses them."""

_ROLES = ("system", "user", "assistant", "tool")
_FIRST, _SECOND, _VALUE = "probe-first", "probe-second", "probe-value"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A word."}},
            "required": ["probe_key"],
        },
    },
}
_USER: ChatMessage = {"role": "user", "content": "Hello."}
_CALL_ID = "probe0001"  # nine letters and digits, as some templates require


class TemplateCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a template supports."""

    tools: bool
    """Whether it writes tool definitions."""
    tool_calls: bool
    """Whether it writes the tool calls of an assistant message."""
    system: bool
    """Whether it writes a system message at the start."""
    developer: bool
    """Whether it supports the role `developer`, writing it differently from an unknown role."""
    strings: frozenset[str]
    """The roles whose content may be a string."""
    parts: frozenset[str]
    """The roles whose content may be a list of parts, all of which it writes."""
    string_arguments: bool
    """Whether it expects a call's arguments as a JSON string, not as an object."""
    null_content: bool
    """Whether it expects null, not an empty string, as the content of a message with only tool calls."""


class TemplateCaps(msgspec.Struct, frozen=True, kw_only=True):
    """`chat_template_caps` of `/props`: what the chat template supports, with llama-server's names."""

    supports_tools: bool
    supports_tool_calls: bool
    supports_parallel_tool_calls: bool
    supports_system_role: bool
    supports_string_content: bool
    supports_typed_content: bool
    supports_object_arguments: bool
    supports_preserve_reasoning: bool
    supports_reasoning_effort: bool


def detect_capabilities(render: Render) -> TemplateCapabilities:
    """Renders about twenty conversations, in 1 to 5 ms."""

    def try_render(messages: list[ChatMessage]) -> str:
        """Some templates fail without tools."""
        return render(messages, None) or render(messages, [PROBE_TOOL]) or ""

    calls = _detect_call_form(render)
    string_arguments, null_content = calls or (False, False)

    def around(role: str, content: Any) -> list[ChatMessage]:
        message = {"role": role, "content": content}
        if role == "system":
            return [message, _USER]
        if role == "assistant":
            return [_USER, message, _USER]
        if role == "tool":
            call = _call(string_arguments=string_arguments, null_content=null_content)
            return [_USER, call, {**message, "tool_call_id": _CALL_ID, "name": "probe_tool"}]
        return [message]

    strings = frozenset(role for role in _ROLES if _FIRST in try_render(around(role, _FIRST)))
    parts = frozenset(role for role in _ROLES if _has_both(try_render(around(role, [_part(_FIRST), _part(_SECOND)]))))
    developer = try_render([{"role": "developer", "content": _FIRST}, _USER])
    unknown = try_render([{"role": "stranger", "content": _FIRST}, _USER])
    return TemplateCapabilities(
        tools="probe_tool" in (render([_USER], [PROBE_TOOL]) or ""),
        tool_calls=calls is not None,
        system="system" in strings | parts,
        developer=_FIRST in developer and developer != unknown.replace("stranger", "developer"),
        strings=strings,
        parts=parts,
        string_arguments=string_arguments,
        null_content=null_content,
    )


def _detect_call_form(render: Render) -> tuple[bool, bool] | None:
    """Returns the (`string_arguments`, `null_content`) with which calls are rendered correctly; None: neither works."""
    for string_arguments in (False, True):
        null, empty = (
            _render_call(render, string_arguments=string_arguments, null_content=null_content)
            for null_content in (True, False)
        )
        if _is_correct(null) and _count_nulls(null) <= _count_nulls(empty):
            return string_arguments, True
        if _is_correct(empty):
            return string_arguments, False
    return None


def _render_call(render: Render, *, string_arguments: bool, null_content: bool) -> str:
    call = _call(string_arguments=string_arguments, null_content=null_content)
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe_tool", "content": "Done."}
    return render([_USER, call, result], [PROBE_TOOL]) or ""


def _call(*, string_arguments: bool, null_content: bool) -> ChatMessage:
    arguments: Any = f'{{"probe_key": "{_VALUE}"}}' if string_arguments else {"probe_key": _VALUE}
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
    return {"role": "assistant", "content": None if null_content else "", "tool_calls": [call]}


def _is_correct(text: str) -> bool:
    """Whether the call is rendered, and neither as Python's repr of an object nor as JSON within JSON."""
    return _VALUE in text and repr({"probe_key": _VALUE}) not in text and f'\\"{_VALUE}' not in text


def _count_nulls(text: str) -> int:
    return text.count("None") + text.count("null")


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _has_both(text: str) -> bool:
    """Whether the texts of both parts are rendered, without keys of the parts in between, as in the list's repr."""
    _, first, after = text.partition(_FIRST)
    between, second, _ = after.partition(_SECOND)
    return bool(first and second) and "text" not in between
