"""OpenAI's messages as a chat template wants them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from cppbatch.chat.capabilities import ChatMessage, TemplateCapabilities
from cppbatch.json_bounds import excess

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which clients send back what a model thought; templates read the first, some the second."""


def adapt_message(message: ChatMessage, capabilities: TemplateCapabilities) -> ChatMessage:
    """A new message that says the same in the way this template takes.

    - A `developer` is `system` where the template does not know the role.
    - Parts of text are joined for roles whose content must be a string, and the other way round.
    - Arguments of tool calls, a string of JSON at OpenAI's, are an object (which nearly all templates want).
    - The content of a message that has only tool calls is null or "", whichever this template writes right.
    - Fields that are null are left out, since templates ask whether they are defined.
    """
    wanted = {key: value for key, value in message.items() if value is not None}
    if wanted["role"] == "developer" and not capabilities.developer:
        wanted["role"] = "system"
    calls = wanted.pop("tool_calls", None)
    if calls:
        wanted["tool_calls"] = [_call(call, capabilities) for call in calls]
    wanted["content"] = _content(wanted["role"], message.get("content"), capabilities)
    if calls and not wanted["content"]:
        wanted["content"] = None if capabilities.null_content else ""
    reasoning = next((wanted[name] for name in _REASONING if name in wanted), None)
    return wanted if reasoning is None else {"thinking": reasoning, **wanted, "reasoning_content": reasoning}


def _content(role: str, content: Any, capabilities: TemplateCapabilities) -> Any:
    if isinstance(content, list):
        return content if role in capabilities.parts else "".join(part["text"] for part in content)
    if content and role in capabilities.parts and role not in capabilities.strings:
        return [{"type": "text", "text": content}]
    return content or ""


def _call(call: dict[str, Any], capabilities: TemplateCapabilities) -> dict[str, Any]:
    if "function" not in call:
        return call
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str) and not capabilities.text_arguments:
        arguments = _object(arguments)
    elif isinstance(arguments, dict) and capabilities.text_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _object(text: str) -> Any:
    """What a model wrote as arguments need not be a JSON object: then the text, which many templates take as well."""
    if excess(text.encode(errors="replace")):
        return text
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
