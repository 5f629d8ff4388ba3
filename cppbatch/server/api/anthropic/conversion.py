"""From Anthropic's body to a `ChatTurn`: messages of content blocks become OpenAI's, which chat templates expect."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import msgspec

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.media_parts import MediaSource
from cppbatch.chat.reasoning import check_budget, effort_variables
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.response import (
    Json,
)
from cppbatch.server.api.anthropic.types import (
    CountTokensRequest,
    ImageSource,
    RequestBlock,
    RequestMessage,
)
from cppbatch.server.fields.documents import pdf_in_base64

_TEXT: dict[str, tuple[str, ...]] = {"text": ("text",)}
_TEXT_AND_IMAGES = {**_TEXT, "image": ("source",)}
_RESULT = {**_TEXT_AND_IMAGES, "tool_reference": ("tool_name",)}
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
"""By role: the supported block types, and the required fields of each."""


_BILLING_HASH = re.compile(r"\A(x-anthropic-billing-header:[^\n]*?\bcch=)[^;\s]*")
"""Claude Code's first line; older versions have a hash there that differs in each request, and no prefix is shared."""
_FIELD_NAMES = {"function.parameters": "input_schema", "function.": ""}
"""Parts of field names: in chat completions, and in this API."""


def message_turn(body: CountTokensRequest) -> ChatTurn:
    """The conversation. Its documents have been read. Raises `InvalidRequest`."""
    body.check_stateless()
    thinking, functions = body.thinking, body.functions()
    effort = effort_variables("output_config.effort", body.output_config.effort if body.output_config else None)
    return ChatTurn(
        _messages(body),
        tools=[*functions.values()],
        choice=body.choice(),
        schema=body.schema(),
        variables=effort | ({"enable_thinking": thinking.type != "disabled"} if thinking else {}),
        thinking_tokens=check_budget(**{"thinking.budget_tokens": thinking.budget_tokens if thinking else None}),
        parse_special=body.parse_special,
        field_names={
            **{f"tools[{i}]": field for i, field in enumerate(functions)},
            **_FIELD_NAMES,
            "response_format": body.constraint_field("output_config.format"),
        },
    )


def _messages(body: CountTokensRequest) -> list[Json]:
    """The messages as chat templates expect them, the system message first.

    Consecutive messages of one role are joined, as in Anthropic's API. Raises `InvalidRequest` for blocks that are
    neither text nor images.
    """
    if not body.messages:
        raise InvalidRequest("messages", "is empty; give at least one message")
    messages: list[Json] = []
    if body.system:
        content = _content(_blocks("system", body.system, _TEXT))
        if isinstance(content, str):
            content = _BILLING_HASH.sub(r"\g<1>fffff", content)
        messages.append({"role": "system", "content": content})
    for role, group in itertools.groupby(enumerate(body.messages), lambda item: item[1].role):
        blocks = [block for i, message in group for block in _message_blocks(f"messages[{i}].content", message)]
        messages += _assistant(blocks) if role == "assistant" else _others(role, blocks)
    return messages


async def read_documents(body: CountTokensRequest) -> None:
    """Replaces documents, also those in results of tools, by their texts. Raises `InvalidRequest`."""
    for i, message in enumerate(body.messages):
        await _read_documents(f"messages[{i}].content", message.content)


async def _read_documents(field: str, content: str | list[RequestBlock] | None) -> None:
    for i, block in enumerate(content if isinstance(content, list) else []):
        named = f"{field}[{i}]"
        if block.type == "tool_result":
            await _read_documents(f"{named}.content", block.content)
        elif block.type == "document":
            if block.source is None:
                raise InvalidRequest(f"{named}.source", "is required")
            text = await _document_text(f"{named}.source", block.source)
            block.text = "\n\n".join(filter(None, [block.title, block.context, text]))
            block.type, block.source = "text", None


async def _document_text(field: str, source: ImageSource) -> str:
    if source.type not in ("base64", "text"):
        raise InvalidRequest(f"{field}.type", f"is {source.type!r:.80}; it must be base64 (a PDF) or text")
    if not source.data:
        raise InvalidRequest(f"{field}.data", "is required")
    return source.data if source.type == "text" else await pdf_in_base64(f"{field}.data", source.data)


class _Named(NamedTuple):
    """A block and the name of its field."""

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
            _blocks(f"{field}[{i}].content", block.content or [], _RESULT)
    return [_Named(f"{field}[{i}]", block) for i, block in enumerate(content)]


def _others(role: str, blocks: list[_Named]) -> list[Json]:
    """Tool results as separate messages, followed by the user's or system's content."""
    results = [_tool_result(each) for each in blocks if each.block.type == "tool_result"]
    said = [each for each in blocks if each.block.type != "tool_result"]
    return [*results, {"role": role, "content": _content(said)}] if said else results


def _tool_result(named: _Named) -> Json:
    block = named.block
    parts = _blocks(f"{named.field}.content", block.content or [], _RESULT)
    content = _content([each._replace(block=_as_text(each.block)) for each in parts])
    if block.is_error:  # OpenAI's messages have no error field
        is_text = isinstance(content, str)
        content = f"Error: {content}" if is_text else [{"type": "text", "text": "Error: "}, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _as_text(block: RequestBlock) -> RequestBlock:
    """For a reference to a tool, a text; other blocks unchanged."""
    if block.type != "tool_reference":
        return block
    return RequestBlock(type="text", text=f"The tool {block.tool_name} can be called from now on.")


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
    """Texts joined into one; with images, a list of parts."""
    if all(each.block.type == "text" for each in blocks):
        return "\n".join(each.block.text or "" for each in blocks)
    return [_part(each) for each in blocks]


def _part(named: _Named) -> Json:
    source = named.block.source
    if named.block.type == "text" or source is None:
        return {"type": "text", "text": named.block.text or ""}
    return MediaSource("image", *source.url_or_data(f"{named.field}.source")).part()
