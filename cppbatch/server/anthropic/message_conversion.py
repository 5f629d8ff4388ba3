"""From Anthropic's body to a `ChatTurn`: messages of content blocks become OpenAI's, which chat templates expect."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.media_parts import MediaSource
from cppbatch.chat.reasoning_effort import effort_variables
from cppbatch.chat.thinking_budget import given_budget
from cppbatch.errors import InvalidRequest
from cppbatch.server.anthropic.message_types import CountTokensRequest, Json, RequestBlock, RequestMessage

_TEXT: dict[str, tuple[str, ...]] = {"text": ("text",)}
_TEXT_AND_IMAGES = {**_TEXT, "image": ("source",)}
_BLOCKS = {
    "system": _TEXT,
    "user": {**_TEXT_AND_IMAGES, "tool_result": ("tool_use_id",)},
    "assistant": {
        **_TEXT,
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
    },
}
"""By role: the supported types of blocks, and the required fields of each."""


_FIELD_NAMES = {"function.parameters": "input_schema", "function.": ""}
"""Parts of field names in chat completions, and in this API."""


def message_turn(body: CountTokensRequest) -> ChatTurn:
    """The conversation. Raises `InvalidRequest`."""
    body.check_stateless()
    thinking = body.thinking
    effort = effort_variables("output_config.effort", body.output_config.effort if body.output_config else None)
    return ChatTurn(
        _messages(body),
        tools=body.functions(),
        choice=body.choice(),
        schema=body.schema(),
        variables=effort | ({"enable_thinking": thinking.type != "disabled"} if thinking else {}),
        thinking_tokens=given_budget(**{"thinking.budget_tokens": thinking.budget_tokens if thinking else None}),
        field_names={**_FIELD_NAMES, "response_format": body.constraint_field("output_config.format")},
    )


def _messages(body: CountTokensRequest) -> list[Json]:
    """The messages as chat templates expect them, the system message first.

    Consecutive messages of one role are joined, as in Anthropic's API. Raises `InvalidRequest` for documents and other
    blocks that are neither text nor images.
    """
    if not body.messages:
        raise InvalidRequest("messages", "is empty; give at least one message")
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": _content(_blocks("system", body.system, _TEXT))})
    for role, group in itertools.groupby(enumerate(body.messages), lambda item: item[1].role):
        blocks = [block for i, message in group for block in _message_blocks(f"messages[{i}].content", message)]
        messages += _assistant(blocks) if role == "assistant" else _others(role, blocks)
    return messages


class _Named(NamedTuple):
    """A block with the name of its field."""

    field: str
    block: RequestBlock


def _message_blocks(field: str, message: RequestMessage) -> list[_Named]:
    if message.content == [] and message.role != "assistant":
        raise InvalidRequest(field, "is empty; give at least one block")
    return _blocks(field, message.content, _BLOCKS[message.role])


def _blocks(field: str, content: str | list[RequestBlock], known: dict[str, tuple[str, ...]]) -> list[_Named]:
    """The content as blocks of the `known` types. Raises `InvalidRequest`."""
    if isinstance(content, str):
        return [_Named(field, RequestBlock(type="text", text=content))]
    for i, block in enumerate(content):
        if block.type not in known:
            message = f"is of type {block.type!r}; supported types are {', '.join(known)}"
            raise InvalidRequest(f"{field}[{i}]", message)
        for name in known[block.type]:
            if getattr(block, name) is None:
                raise InvalidRequest(f"{field}[{i}].{name}", "is required")
        if block.type == "tool_result":
            _blocks(f"{field}[{i}].content", block.content or [], _TEXT_AND_IMAGES)
    return [_Named(f"{field}[{i}]", block) for i, block in enumerate(content)]


def _others(role: str, blocks: list[_Named]) -> list[Json]:
    """The results of tools as messages of their own, then what the user or the system says."""
    results = [_tool_result(each) for each in blocks if each.block.type == "tool_result"]
    said = [each for each in blocks if each.block.type != "tool_result"]
    return [*results, {"role": role, "content": _content(said)}] if said else results


def _tool_result(named: _Named) -> Json:
    block = named.block
    content = _content(_blocks(f"{named.field}.content", block.content or [], _TEXT_AND_IMAGES))
    if block.is_error:  # OpenAI's messages have no field for errors
        is_text = isinstance(content, str)
        content = f"Error: {content}" if is_text else [{"type": "text", "text": "Error: "}, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _assistant(named: list[_Named]) -> list[Json]:
    blocks = [each.block for each in named]
    calls = [_tool_call(block) for block in blocks if block.type == "tool_use"]
    text = "".join(block.text or "" for block in blocks)  # not "\n": the blocks are one continuous text
    message: Json = {"role": "assistant", "content": None if calls and not text else text}
    if reasoning := "".join(block.thinking or "" for block in blocks):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool_call(block: RequestBlock) -> Json:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _content(blocks: list[_Named]) -> str | list[Json]:
    """Texts as one; with images a list of parts."""
    if all(each.block.type == "text" for each in blocks):
        return "\n".join(each.block.text or "" for each in blocks)
    return [_part(each) for each in blocks]


def _part(named: _Named) -> Json:
    source = named.block.source
    if named.block.type == "text" or source is None:
        return {"type": "text", "text": named.block.text or ""}
    return MediaSource("image", *source.url_or_data(f"{named.field}.source")).part()
