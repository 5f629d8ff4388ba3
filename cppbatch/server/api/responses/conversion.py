"""Converts the request body to a `ChatTurn`: its items become messages, as chat templates expect."""

from __future__ import annotations

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.escaped_lark import INPUT
from cppbatch.chat.reasoning import check_budget, effort_variables
from cppbatch.errors import InvalidRequest
from cppbatch.server.api.responses.tools import UsedTools
from cppbatch.server.api.responses.types import (
    InputItem,
    InputPart,
    Json,
    ResponsesRequest,
)

_ROLES = ("system", "developer", "user", "assistant")
_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The types of items that have required fields, with these fields."""
_ADDED_TOOLS = ("additional_tools", "tool_search_output")
"""The types of items whose tools are added to those of the request."""
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_MEDIA_PARTS = ("input_image", "input_audio")


_FIELD_NAMES = {"custom.format.grammar": "format", "custom.": "", "function.": "", "messages": "input"}
"""Parts of field names: in chat completions, and in this API."""


def response_turn(body: ResponsesRequest, tools: UsedTools | None = None) -> ChatTurn:
    """The conversation. `tools`: of this body; None: they are read here. Raises `InvalidRequest`."""
    body.check_stateless()
    tools = tools or body.used_tools()
    return ChatTurn(
        _messages(body, tools),
        tools=tools.functions,
        choice=body.choice(tools),
        schema=body.schema(),
        variables=effort_variables("reasoning.effort", body.reasoning.effort if body.reasoning else None),
        thinking_tokens=check_budget(thinking_budget=body.thinking_budget),
        parse_special=body.parse_special,
        field_names={**tools.fields, **_FIELD_NAMES, "response_format": body.constraint_field("text.format")},
    )


def _messages(body: ResponsesRequest, tools: UsedTools) -> list[Json]:
    """The messages as chat templates expect them, `instructions` first. Raises `InvalidRequest`."""
    messages: list[Json] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise InvalidRequest("input", "is empty; give text or at least one item")
    for i, item in enumerate(body.input):
        _check(f"input[{i}]", item)
        _add(messages, f"input[{i}]", item, tools)
    for message in messages:
        if message["role"] == "assistant":
            for name in ("content", "reasoning_content"):
                if isinstance(message.get(name), list):
                    message[name] = "\n".join(message[name])
    return messages


def _check(field: str, item: InputItem) -> None:
    if not (item.type in _REQUIRED or item.type in _ADDED_TOOLS or _is_foreign(item)):
        message = f"is of type {item.type!r:.80}; supported types are {', '.join((*_REQUIRED, *_ADDED_TOOLS))}"
        if item.type == "item_reference":
            message = "references a stored item, but this server stores nothing; send the item itself"
        raise InvalidRequest(field, message)
    for name in _REQUIRED.get(item.type, ()):
        if getattr(item, name) is None:
            raise InvalidRequest(f"{field}.{name}", "is required")
    if item.type == "message" and item.role not in _ROLES:
        raise InvalidRequest(f"{field}.role", f"is {item.role!r}; it must be one of {', '.join(_ROLES)}")


def _is_foreign(item: InputItem) -> bool:
    """Whether it is a call of a tool that OpenAI's servers run, such as `web_search_call`, or its output."""
    return item.type.endswith(("_call", "_call_output"))


def _add(messages: list[Json], field: str, item: InputItem, tools: UsedTools) -> None:
    call_id = item.call_id or item.id
    if item.type == "additional_tools":
        return
    if item.type.endswith("_output"):
        output = _content(f"{field}.output", item.output) or ", ".join(tool.name for tool in item.tools or ())
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif item.type in ("function_call", "custom_tool_call") or _is_foreign(item):
        arguments = {INPUT: item.input} if item.type == "custom_tool_call" else item.arguments or item.action or {}
        name = tools.model_name(item.namespace, item.name or item.type.removesuffix("_call"))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        _assistant(messages).setdefault("tool_calls", []).append(call)
        if not item.call_id:  # its server has run it: no other item has the output
            output = _content(f"{field}.output", item.output) or item.status or ""
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif item.type == "reasoning":
        reasoning = _text(f"{field}.content", item.content) or _text(f"{field}.summary", item.summary)
        if reasoning:
            _append(_assistant(messages), "reasoning_content", reasoning)
    elif item.role == "assistant":
        _append(_assistant(messages), "content", _text(f"{field}.content", item.content))
    else:
        messages.append({"role": item.role, "content": _content(f"{field}.content", item.content)})


def _assistant(messages: list[Json]) -> Json:
    """The assistant's message that an item belongs to: consecutive reasoning, texts and calls form one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _append(message: Json, name: str, text: str) -> None:
    """Collects texts in a list. `_messages` joins them once at the end, because there may be thousands."""
    if message.get(name) is None:
        message[name] = []
    message[name].append(text)


def _content(field: str, content: str | list[InputPart] | None) -> str | list[Json]:
    """Texts joined into one; with images or audio, a list of parts."""
    if isinstance(content, list):
        sources = [part.source(part.type, f"{field}[{i}]") for i, part in enumerate(content)]
        if any(sources):
            return [
                source.part() if source else {"type": "text", "text": _text(field, content[i : i + 1], i)}
                for i, source in enumerate(sources)
            ]
    return _text(field, content)


def _text(field: str, content: str | list[InputPart] | None, first: int = 0) -> str:
    """The texts of parts, the first of which has this index. Raises `InvalidRequest` for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content, first):
        if part.type not in _TEXT_PARTS or (part.text is None and part.refusal is None):
            message = f"is of type {part.type!r:.80}; supported types are {', '.join((*_TEXT_PARTS, *_MEDIA_PARTS))}"
            raise InvalidRequest(f"{field}[{i}]", message)
    return "\n".join(part.text or part.refusal or "" for part in content)
