"""What a chat template makes of a conversation, found out by rendering short ones with it.

Templates differ in what they take and say so nowhere. Each probe has words that occur nowhere else, and looks where
they end up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

ChatMessage = dict[str, Any]
Render = Callable[[list[ChatMessage], list[dict[str, Any]] | None], str | None]
"""Messages and tools to a text, None when the template refuses them."""

_ROLES = ("system", "user", "assistant", "tool")
_FIRST, _SECOND, _VALUE = "probe-first", "probe-second", "probe-value"
_TOOL = {
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
_CALL_ID = "probe0001"  # nine letters and digits: some templates insist on that


class TemplateCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a template takes."""

    tools: bool
    """It writes the definitions of tools."""
    tool_calls: bool
    """It writes the calls that an assistant's message has."""
    system: bool
    """It writes a system message at the beginning."""
    developer: bool
    """It knows the role `developer`, and writes it other than one it has never heard of."""
    strings: frozenset[str]
    """The roles whose content may be a string."""
    parts: frozenset[str]
    """The roles whose content may be a list of parts, all of which it writes."""
    text_arguments: bool
    """It wants a call's arguments as JSON in a string, rather than as an object."""
    null_content: bool
    """It wants null as the content of a message that has only tool calls, rather than an empty string."""


def detect_capabilities(render: Render) -> TemplateCapabilities:
    """Some twenty renderings, a few milliseconds."""

    def written(messages: list[ChatMessage]) -> str:
        """Some templates cannot do without tools."""
        return render(messages, None) or render(messages, [_TOOL]) or ""

    calls = _how_calls_are_wanted(render)
    text_arguments, null_content = calls or (False, False)

    def around(role: str, content: Any) -> list[ChatMessage]:
        message = {"role": role, "content": content}
        if role == "system":
            return [message, _USER]
        if role == "assistant":
            return [_USER, message, _USER]
        if role == "tool":
            call = _call(text_arguments=text_arguments, null_content=null_content)
            return [_USER, call, {**message, "tool_call_id": _CALL_ID, "name": "probe_tool"}]
        return [message]

    strings = frozenset(role for role in _ROLES if _FIRST in written(around(role, _FIRST)))
    parts = frozenset(role for role in _ROLES if _has_both(written(around(role, [_part(_FIRST), _part(_SECOND)]))))
    developer = written([{"role": "developer", "content": _FIRST}, _USER])
    stranger = written([{"role": "stranger", "content": _FIRST}, _USER])
    return TemplateCapabilities(
        tools="probe_tool" in (render([_USER], [_TOOL]) or ""),
        tool_calls=calls is not None,
        system="system" in strings | parts,
        developer=_FIRST in developer and developer != stranger.replace("stranger", "developer"),
        strings=strings,
        parts=parts,
        text_arguments=text_arguments,
        null_content=null_content,
    )


def _how_calls_are_wanted(render: Render) -> tuple[bool, bool] | None:
    """(`text_arguments`, `null_content`) with which a call comes out right; None: with none of them."""
    for text_arguments in (False, True):
        null, empty = (
            _render_call(render, text_arguments=text_arguments, null_content=null_content)
            for null_content in (True, False)
        )
        if _is_right(null) and _nulls(null) <= _nulls(empty):
            return text_arguments, True
        if _is_right(empty):
            return text_arguments, False
    return None


def _render_call(render: Render, *, text_arguments: bool, null_content: bool) -> str:
    call = _call(text_arguments=text_arguments, null_content=null_content)
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe_tool", "content": "Done."}
    return render([_USER, call, result], [_TOOL]) or ""


def _call(*, text_arguments: bool, null_content: bool) -> ChatMessage:
    arguments: Any = f'{{"probe_key": "{_VALUE}"}}' if text_arguments else {"probe_key": _VALUE}
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
    return {"role": "assistant", "content": None if null_content else "", "tool_calls": [call]}


def _is_right(text: str) -> bool:
    """The call is there, neither as Python would print an object nor as JSON within JSON."""
    return _VALUE in text and repr({"probe_key": _VALUE}) not in text and f'\\"{_VALUE}' not in text


def _nulls(text: str) -> int:
    return text.count("None") + text.count("null")


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _has_both(text: str) -> bool:
    """Both parts' texts, with nothing of the list between them as when all of it is printed."""
    _, first, after = text.partition(_FIRST)
    between, second, _ = after.partition(_SECOND)
    return bool(first and second) and "text" not in between
