"""From the body of a response to a `ChatTurn`: its items become messages, which chat templates expect."""

from __future__ import annotations

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.escaped_lark import INPUT
from cppbatch.chat.reasoning_effort import effort_variables
from cppbatch.chat.thinking_budget import given_budget
from cppbatch.errors import InvalidRequest
from cppbatch.server.responses.responses_types import InputItem, InputPart, Json, ResponsesRequest

_ROLES = ("system", "developer", "user", "assistant")
_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The supported types of items, and the required fields of each."""
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_MEDIA_PARTS = ("input_image", "input_audio")


_FIELD_NAMES = {"custom.format.grammar": "format", "custom.": "", "function.": "", "messages": "input"}
"""Parts of field names in chat completions, and in this API."""


def response_turn(body: ResponsesRequest) -> ChatTurn:
    """The conversation. Raises `InvalidRequest`."""
    body.check_stateless()
    return ChatTurn(
        _messages(body),
        tools=body.functions(),
        choice=body.choice(),
        schema=body.schema(),
        variables=effort_variables("reasoning.effort", body.reasoning.effort if body.reasoning else None),
        thinking_tokens=given_budget(thinking_budget=body.thinking_budget),
        field_names={**_FIELD_NAMES, "response_format": body.constraint_field("text.format")},
    )


def _messages(body: ResponsesRequest) -> list[Json]:
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
        _add(messages, f"input[{i}]", item)
    for message in messages:
        if message["role"] == "assistant":
            for name in ("content", "reasoning_content"):
                if isinstance(message.get(name), list):
                    message[name] = "\n".join(message[name])
    return messages


def _check(field: str, item: InputItem) -> None:
    if item.type not in _REQUIRED:
        message = f"is of type {item.type!r}; supported types are {', '.join(_REQUIRED)}"
        if item.type == "item_reference":
            message = "references a stored item, but this server stores nothing; send the item itself"
        raise InvalidRequest(field, message)
    for name in _REQUIRED[item.type]:
        if getattr(item, name) is None:
            raise InvalidRequest(f"{field}.{name}", "is required")
    if item.type == "message" and item.role not in _ROLES:
        raise InvalidRequest(f"{field}.role", f"is {item.role!r}; it must be one of {', '.join(_ROLES)}")


def _add(messages: list[Json], field: str, item: InputItem) -> None:
    if item.type in ("function_call_output", "custom_tool_call_output"):
        output = _content(f"{field}.output", item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    elif item.type in ("function_call", "custom_tool_call"):
        arguments = item.arguments if item.type == "function_call" else {INPUT: item.input}
        function = {"name": item.name, "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
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
    """Collects texts in a list. `_messages` joins them at the end, because there may be thousands."""
    if message.get(name) is None:
        message[name] = []
    message[name].append(text)


def _content(field: str, content: str | list[InputPart] | None) -> str | list[Json]:
    """Texts as one; with pictures or sounds a list of parts."""
    if isinstance(content, list):
        sources = [part.source(part.type, f"{field}[{i}]") for i, part in enumerate(content)]
        if any(sources):
            return [
                source.part() if source else {"type": "text", "text": _text(field, content[i : i + 1], i)}
                for i, source in enumerate(sources)
            ]
    return _text(field, content)


def _text(field: str, content: str | list[InputPart] | None, first: int = 0) -> str:
    """The texts of parts, of which the first one has this index. Raises `InvalidRequest` for others."""
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content, first):
        if part.type not in _TEXT_PARTS or (part.text is None and part.refusal is None):
            message = f"is of type {part.type!r:.80}; supported types are {', '.join((*_TEXT_PARTS, *_MEDIA_PARTS))}"
            raise InvalidRequest(f"{field}[{i}]", message)
    return "\n".join(part.text or part.refusal or "" for part in content)
