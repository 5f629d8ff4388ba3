"""`POST /v1/messages` and `POST /v1/messages/count_tokens`. Their types are in `message_types`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.engine.request import GenerationEvent
from cppbatch.server.anthropic.message_conversion import conversation
from cppbatch.server.anthropic.message_types import (
    BlockJsonDelta,
    BlockTextDelta,
    BlockThinkingDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CountTokensRequest,
    CountTokensResponse,
    MessageDelta,
    MessageEnd,
    MessagesRequest,
    MessagesResponse,
    MessageStart,
    MessageStop,
    MessageUsage,
    ResponseBlock,
    StopReason,
    StreamEvent,
    TextBlock,
    ThinkingBlock,
    ThinkingTokensDetails,
    ToolUseBlock,
)
from cppbatch.server.api_errors import AnthropicErrorResponse, anthropic_error, api_error, json_response
from cppbatch.server.assistant_output import AssistantOutput
from cppbatch.server.content_blocks import BlockChange, ContentBlock, ContentBlocks
from cppbatch.server.endpoint import generation_endpoint
from cppbatch.server.parse import read_json
from cppbatch.server.response import Json, PreparedRequest, ResponseBuilder, ServerSentEvent, respond
from cppbatch.server.serving import SERVING, Serving, new_id

_FORMAT = "output_config.format"
_CHAT_FIELD_NAMES = {"function.parameters": "input_schema", "function.": "", "response_format": _FORMAT}
_FIELD_NAMES = {"prompt": "messages", "stop": "stop_sequences"}

routes = web.RouteTableDef()


@routes.post("/v1/messages")
async def messages(request: web.Request) -> web.StreamResponse:
    """Generates the assistant's next message of a conversation."""
    body = await read_json(request, MessagesRequest)
    return await respond(request, await prepare_message(body, request.app[SERVING]))


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: web.Request) -> web.Response:
    """Counts the prompt tokens that the same `/v1/messages` would have."""
    body, serving = await read_json(request, CountTokensRequest), request.app[SERVING]
    serving.check_model(body.model)
    chat = await _prepare_chat(body, serving)
    return json_response(CountTokensResponse(input_tokens=len(await serving.client.tokenize(chat.prompt))))


ENDPOINTS = {
    ("post", "/v1/messages"): generation_endpoint(
        "Generates the assistant's next message of a conversation, in Anthropic's API",
        MessagesRequest,
        MessagesResponse,
    )._replace(error=AnthropicErrorResponse, unavailable=AnthropicErrorResponse),
    ("post", "/v1/messages/count_tokens"): generation_endpoint(
        "Counts the prompt tokens of a conversation, in Anthropic's API",
        CountTokensRequest,
        CountTokensResponse,
        streams=False,
    )._replace(error=AnthropicErrorResponse, unavailable=AnthropicErrorResponse),
}


async def prepare_message(body: MessagesRequest, serving: Serving) -> PreparedRequest:
    """The engine request and the builder for a message. Raises `InvalidRequest`."""
    serving.check(body)
    chat = await _prepare_chat(body, serving)
    params = serving.params(body, chat.params)
    builder = MessagesBuilder(serving.name, chat, body.max_tokens)
    requests = serving.engine_requests(body, builder.id, [chat.prompt], params)
    field = body.constraint_names.get("json_schema", _FORMAT)
    names = {"json_schema": field} | body.constraint_names | chat.renamed(field)
    return PreparedRequest(requests, builder, stream=bool(body.stream), field_names=_FIELD_NAMES | names)


async def _prepare_chat(body: CountTokensRequest, serving: Serving) -> PreparedChat:
    body.check_stateless()
    serving.check_size("messages", body.messages, body.tools)
    return await serving.prepare_chat(
        conversation(body),
        tools=body.functions(),
        choice=body.choice(),
        schema=body.schema(),
        variables=body.template_variables(),
        field_names=_CHAT_FIELD_NAMES,
    )


class MessagesBuilder(ResponseBuilder):
    """Builds the response of `/v1/messages`. `max_tokens`: the request's."""

    def __init__(self, model: str, chat: PreparedChat, max_tokens: int) -> None:
        super().__init__()
        self.id = new_id("msg_")
        self._model = model
        self._max_tokens = max_tokens
        self._output = AssistantOutput(chat)
        self._blocks = ContentBlocks()

    def build(self, completions: list[list[GenerationEvent]]) -> MessagesResponse:
        """As in `ResponseBuilder`."""
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
        )

    def stream_start(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`. The usage is 0 because the number of prompt tokens is known only at the end."""
        usage = MessageUsage(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)
        message = MessagesResponse(
            id=self.id, model=self._model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return [_sent(MessageStart(message=message))]

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [_sent(_block_event(change)) for change in self._read(event)]

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [_sent(MessageDelta(delta=self._end(), usage=self._usage())), _sent(MessageStop())]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [ServerSentEvent(anthropic_error(api_error(error)), "error")]

    def _read(self, event: GenerationEvent) -> list[BlockChange]:
        changes = self._blocks.read(self._output.read(event))
        return [*changes, *self._blocks.close()] if event.finish_reason else changes

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
    """A block of the message; None for a call whose arguments were cut off."""
    if block.kind == "text":
        return TextBlock(text=block.text)
    if block.kind == "reasoning":
        return ThinkingBlock(thinking=block.text)
    try:
        arguments = msgspec.json.decode(block.text or "{}", type=Json)
    except msgspec.DecodeError:
        return None
    return ToolUseBlock(id=block.call_id, name=block.name, input=arguments)


def _block_event(change: BlockChange) -> StreamEvent:
    step, block, text = change
    if step == "start":
        empty = _block(ContentBlock(block.index, block.kind, call_id=block.call_id, name=block.name))
        assert empty is not None
        return ContentBlockStart(index=block.index, content_block=empty)
    if step == "stop":
        return ContentBlockStop(index=block.index)
    if block.kind == "text":
        return ContentBlockDelta(index=block.index, delta=BlockTextDelta(text))
    if block.kind == "reasoning":
        return ContentBlockDelta(index=block.index, delta=BlockThinkingDelta(text))
    return ContentBlockDelta(index=block.index, delta=BlockJsonDelta(text))


def _sent(event: StreamEvent) -> ServerSentEvent:
    """The event under the name of its type."""
    return ServerSentEvent(event, str(event.__struct_config__.tag))
