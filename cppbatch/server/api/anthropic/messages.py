"""`POST /v1/messages` and `POST /v1/messages/count_tokens`. Their types are in `types`."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.messages import MediaSource
from cppbatch.chat.reasoning import check_budget, effort_variables
from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.request import GenerationEvent, RequestUsage
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.llama_result import StreamTimings, Timings, timings
from cppbatch.server.answer.response import (
    BlockChange,
    ContentBlock,
    ContentBlocks,
    Json,
    PreparedRequest,
    ResponseBuilder,
    generation,
)
from cppbatch.server.api.anthropic.types import (
    BlockJsonDelta,
    BlockTextDelta,
    BlockThinkingDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CountTokensRequest,
    CountTokensResponse,
    ImageSource,
    MessageDelta,
    MessageEnd,
    MessagesRequest,
    MessagesResponse,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    RequestBlock,
    RequestMessage,
    ResponseBlock,
    StopReason,
    StreamEvent,
    TextBlock,
    ThinkingBlock,
    ThinkingTokensDetails,
    ToolUseBlock,
)
from cppbatch.server.fields.documents import pdf_in_base64
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import AnthropicErrorResponse, anthropic_error, api_error, json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.served import lease_model
from cppbatch.server.models.serving import ResolvedTurn, Serving

routes = Routes()

_ERRORS: Json = {"error": AnthropicErrorResponse, "unavailable": AnthropicErrorResponse}


@routes.post("/v1/messages/count_tokens", CountTokensResponse, CountTokensRequest, **_ERRORS)
async def count_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a conversation, in Anthropic's API.

    The same count as for `/v1/messages` with this body.
    """
    body = await read_json(request, CountTokensRequest)
    with await lease_model(request, body) as lease:
        serving = lease.serving
        serving.check_model(body.model)
        serving.check_size(body)
        await read_documents(body)
        tokens = await serving.chat_tokens(await serving.render(message_turn(body)))
    return json_response(CountTokensResponse(input_tokens=len(tokens)))


@generation(routes, "/v1/messages", MessagesRequest, MessagesResponse, **_ERRORS)
async def prepare_message(body: MessagesRequest, serving: Serving) -> PreparedRequest:
    """Generate the next assistant message, in Anthropic's API.

    Raises `InvalidRequest`.
    """
    serving.check(body)
    if body.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"is {body.max_tokens}; it must be at least 1")
    serving.check_size(body)
    await read_documents(body)
    turn = await serving.resolve(message_turn(body), body, "msg_")
    builder = MessagesBuilder(body, serving.name, turn)
    return PreparedRequest(
        turn.requests, builder, stream=bool(body.stream), field_names=turn.field_names, ignored=body.left_out()
    )


class MessagesBuilder(ResponseBuilder):
    """Builds the response of `/v1/messages`."""

    def __init__(self, body: MessagesRequest, model: str, turn: ResolvedTurn) -> None:
        super().__init__()
        self.id = turn.id
        self._model = model
        self._max_tokens = body.max_tokens
        self._output = AssistantOutput(turn.chat)
        self._blocks = ContentBlocks()
        self._at_start: RequestUsage | None = None
        self._stream_timings = StreamTimings(body)
        self._shows_timings = bool(body.timings_per_token)

    def record(self, index: int, event: GenerationEvent) -> None:
        """Keeps the first usage, for `message_start`."""
        super().record(index, event)
        self._at_start = self._at_start or event.usage

    def build(self, completions: list[list[GenerationEvent]]) -> MessagesResponse:
        """Returns the message with all blocks."""
        for event in completions[0]:
            self._read(event)
        blocks = [_block(block) for block in self._blocks.all]
        end = self._end()
        return MessagesResponse(
            id=self.id,
            model=self._model,
            content=[block for block in blocks if block is not None],
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=self._usage(),
            timings=self._timings(),
        )

    starts_with_counts = True

    def stream_ping(self) -> ServerSentEvent:
        """Returns Anthropic's `ping` event."""
        return _to_sse(Ping())

    def stream_start(self) -> list[ServerSentEvent]:
        """Returns `message_start` with the prompt's token counts, from the engine's first event (`usage_events`)."""
        assert self._at_start
        usage = MessageUsage(
            input_tokens=self._at_start.prompt_tokens - self._at_start.cached_tokens,
            cache_read_input_tokens=self._at_start.cached_tokens,
            output_tokens=0,
        )
        message = MessagesResponse(
            id=self.id, model=self._model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return [_to_sse(MessageStart(message=message))]

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """Returns the events of the blocks, after a `ping` with the prompt's progress."""
        progress, per_token = self._stream_timings.progress(index, event), self._stream_timings.per_token(event)
        events: list[StreamEvent] = [] if progress is UNSET else [Ping(prompt_progress=progress, timings=per_token)]
        events += [_block_event(change, per_token) for change in self._read(event)]
        return [_to_sse(event) for event in events]

    def stream_end(self) -> list[ServerSentEvent]:
        """Returns `message_delta` with the usage, and `message_stop`."""
        end = MessageDelta(delta=self._end(), usage=self._usage(), timings=self._timings())
        return [_to_sse(end), _to_sse(MessageStop())]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """Returns an `error` event."""
        return [ServerSentEvent(anthropic_error(api_error(error)), "error")]

    def _read(self, event: GenerationEvent) -> list[BlockChange]:
        changes = self._blocks.read(self._output.read(event))
        return [*changes, *self._blocks.close()] if event.finish_reason else changes

    def _timings(self) -> Timings | UnsetType:
        usage = self.last_events[0].usage
        return timings(usage) if self._shows_timings and usage else UNSET

    def _end(self) -> MessageEnd:
        stop = self.last_events[0].stop
        return MessageEnd(stop_reason="stop_sequence" if stop else self._stop_reason(), stop_sequence=stop)

    def _stop_reason(self) -> StopReason:
        if self._output.finish_reason == "tool_calls":
            return "tool_use"
        if self._output.finish_reason == "timeout":
            return "pause_turn"  # the client may send the message back to have it continued
        if self._output.finish_reason == "stop":
            return "end_turn"
        return "max_tokens" if self.token_counts().completion >= self._max_tokens else "model_context_window_exceeded"

    def _usage(self) -> MessageUsage:
        counts = self.token_counts()
        return MessageUsage(
            input_tokens=counts.prompt - counts.cached,
            cache_read_input_tokens=counts.cached,
            output_tokens=counts.completion,
            output_tokens_details=ThinkingTokensDetails(thinking_tokens=self._output.reasoning_tokens),
        )


def _block(block: ContentBlock) -> ResponseBlock | None:
    """A block of the message; None for a call with truncated arguments."""
    if block.kind == "text":
        return TextBlock(text=block.text)
    if block.kind == "reasoning":
        return ThinkingBlock(thinking=block.text)
    try:
        arguments = msgspec.json.decode(block.text or "{}", type=Json)
    except msgspec.DecodeError:
        return None
    return ToolUseBlock(id=block.call_id, name=block.name, input=arguments)


def _block_event(change: BlockChange, timings: Timings | UnsetType) -> StreamEvent:
    """`timings`: shown in the delta."""
    step, block, text = change
    if step == "start":
        empty = _block(ContentBlock(block.index, block.kind, call_id=block.call_id, name=block.name))
        assert empty is not None
        return ContentBlockStart(index=block.index, content_block=empty)
    if step == "stop":
        return ContentBlockStop(index=block.index)
    delta: BlockTextDelta | BlockThinkingDelta | BlockJsonDelta
    if block.kind == "text":
        delta = BlockTextDelta(text)
    elif block.kind == "reasoning":
        delta = BlockThinkingDelta(text)
    else:
        delta = BlockJsonDelta(text)
    return ContentBlockDelta(index=block.index, delta=delta, timings=timings)


def _to_sse(event: StreamEvent) -> ServerSentEvent:
    """The event, named after its type."""
    return ServerSentEvent(event, str(event.__struct_config__.tag))


# --- message conversion ----------------------------------------------------------------------------------------------
# From Anthropic's body to a `ChatTurn`: messages of content blocks become OpenAI's, which chat templates expect.


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
