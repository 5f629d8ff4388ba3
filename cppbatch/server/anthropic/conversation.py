"""From Anthropic's messages, made of blocks, to OpenAI's, which chat templates know."""

from __future__ import annotations

import itertools

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.server.anthropic.schemas import Block, CountTokensRequest, InputMessage, Json

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
"""By role: the blocks that can be read, and what each must have."""


def conversation(body: CountTokensRequest) -> list[Json]:
    """The messages as chat templates want them, the system's first.

    Messages of one role that follow one another are one, as in Anthropic's API. Raises `InvalidRequest` for images,
    documents, and whatever else is no text.
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


def _message_blocks(field: str, message: InputMessage) -> list[Block]:
    if message.content == [] and message.role != "assistant":
        raise InvalidRequest(field, "is empty; give at least one block")
    return _blocks(field, message.content, _BLOCKS[message.role])


def _blocks(field: str, content: str | list[Block], known: dict[str, tuple[str, ...]]) -> list[Block]:
    """The content as blocks, which are of these types. Raises `InvalidRequest`."""
    if isinstance(content, str):
        return [Block(type="text", text=content)]
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


def _others(role: str, blocks: list[Block]) -> list[Json]:
    """What the tools have answered, then what the user, or the system, says."""
    results = [_result(block) for block in blocks if block.type == "tool_result"]
    texts = [block for block in blocks if block.type == "text"]
    return [*results, {"role": role, "content": _text(texts)}] if texts else results


def _result(block: Block) -> Json:
    content = block.content if isinstance(block.content, str) else _text(block.content or [])
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {content}" if block.is_error else content,  # OpenAI's messages have no field for it
    }


def _assistant(blocks: list[Block]) -> list[Json]:
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    text = "".join(block.text or "" for block in blocks)  # parts of one text, not texts of their own
    message: Json = {"role": "assistant", "content": None if calls and not text else text}
    if thoughts := "".join(block.thinking or "" for block in blocks):
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: Block) -> Json:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(blocks: list[Block]) -> str:
    return "\n".join(block.text or "" for block in blocks)
