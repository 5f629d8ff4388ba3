"""From Anthropic's messages, which are made of content blocks, to OpenAI's messages, which chat templates expect."""

from __future__ import annotations

import itertools

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.server.anthropic.message_types import CountTokensRequest, Json, RequestBlock, RequestMessage

_TEXT: dict[str, tuple[str, ...]] = {"text": ("text",)}
_BLOCKS = {
    "system": _TEXT,
    "user": {**_TEXT, "tool_result": ("tool_use_id",)},
    "assistant": {
        **_TEXT,
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
    },
}
"""By role: the supported types of blocks, and the required fields of each."""


def conversation(body: CountTokensRequest) -> list[Json]:
    """The messages as chat templates expect them, the system message first.

    Consecutive messages of one role are joined, as in Anthropic's API. Raises `InvalidRequest` for images, documents
    and other blocks that are not text.
    """
    if not body.messages:
        raise InvalidRequest("messages", "is empty; give at least one message")
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": _text(_blocks("system", body.system, _TEXT))})
    for role, group in itertools.groupby(enumerate(body.messages), lambda item: item[1].role):
        blocks = [block for i, message in group for block in _message_blocks(f"messages[{i}].content", message)]
        messages += _assistant(blocks) if role == "assistant" else _others(role, blocks)
    return messages


def _message_blocks(field: str, message: RequestMessage) -> list[RequestBlock]:
    if message.content == [] and message.role != "assistant":
        raise InvalidRequest(field, "is empty; give at least one block")
    return _blocks(field, message.content, _BLOCKS[message.role])


def _blocks(field: str, content: str | list[RequestBlock], known: dict[str, tuple[str, ...]]) -> list[RequestBlock]:
    """The content as blocks of the `known` types. Raises `InvalidRequest`."""
    if isinstance(content, str):
        return [RequestBlock(type="text", text=content)]
    for i, block in enumerate(content):
        if block.type not in known:
            message = f"is of type {block.type!r}; what can be read here is {', '.join(known)}"
            raise InvalidRequest(f"{field}[{i}]", message)
        for name in known[block.type]:
            if getattr(block, name) is None:
                raise InvalidRequest(f"{field}[{i}].{name}", "is required")
        if block.type == "tool_result":
            _blocks(f"{field}[{i}].content", block.content or [], _TEXT)
    return content


def _others(role: str, blocks: list[RequestBlock]) -> list[Json]:
    """The results of tools as messages of their own, then the text of the user or the system."""
    results = [_tool_result(block) for block in blocks if block.type == "tool_result"]
    texts = [block for block in blocks if block.type == "text"]
    return [*results, {"role": role, "content": _text(texts)}] if texts else results


def _tool_result(block: RequestBlock) -> Json:
    content = block.content if isinstance(block.content, str) else _text(block.content or [])
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {content}" if block.is_error else content,  # OpenAI's messages have no field for errors
    }


def _assistant(blocks: list[RequestBlock]) -> list[Json]:
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


def _text(blocks: list[RequestBlock]) -> str:
    return "\n".join(block.text or "" for block in blocks)
