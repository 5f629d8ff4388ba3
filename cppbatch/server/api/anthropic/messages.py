"""`POST /v1/messages` and `POST /v1/messages/count_tokens`. Their types are in `types`."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.request import GenerationEvent, RequestUsage
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.llama_result import StreamTimings, Timings
from cppbatch.server.answer.response import (
    BlockChange,
    ContentBlock,
    ContentBlocks,
    Json,
    ResponseBuilder,
    generation,
)
from cppbatch.server.api.anthropic.conversion import message_turn, read_documents
from cppbatch.server.api.anthropic.types import (
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
    Ping,
    ResponseBlock,
    StopReason,
    StreamEvent,
    TextBlock,
    ThinkingBlock,
    ThinkingTokensDetails,
    ToolUseBlock,
)
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import api_error, json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.error_formats import AnthropicErrorResponse, anthropic_error
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.served import lease_model
from cppbatch.server.models.serving import ResolvedRequest, Serving

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
async def prepare_message(body: MessagesRequest, serving: Serving) -> MessagesBuilder:
    """Generate the next assistant message, in Anthropic's API.

    Raises `InvalidRequest`.
    """
    serving.check(body)
    if body.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"is {body.max_tokens}; it must be at least 1")
    serving.check_size(body)
    await read_documents(body)
    return MessagesBuilder(body, serving.name, await serving.resolve(message_turn(body), body, "msg_"))


class MessagesBuilder(ResponseBuilder):
    """Builds the response of `/v1/messages`."""

    def __init__(self, body: MessagesRequest, model: str, resolved: ResolvedRequest) -> None:
        super().__init__(resolved, stream=body.stream, ignored=body.left_out())
        self.id = resolved.id
        self._model = model
        self._max_tokens = body.max_tokens
        self._output = AssistantOutput(resolved.chat)
        self._blocks = ContentBlocks()
        self._at_start: RequestUsage | None = None
        self._stream_timings = StreamTimings(body)
        self._shows_timings = bool(body.timings_per_token)

    def record(self, index: int, event: GenerationEvent) -> None:
        """Keeps the first usage, for `message_start`."""
        super().record(index, event)
        self._at_start = self._at_start or event.usage

    def build(self, completions: list[list[GenerationEvent]]) -> MessagesResponse:
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
            timings=self.timings(),
        )

    starts_with_counts = True

    def stream_ping(self) -> ServerSentEvent:
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
        end = MessageDelta(delta=self._end(), usage=self._usage(), timings=self.timings())
        return [_to_sse(end), _to_sse(MessageStop())]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        return [ServerSentEvent(anthropic_error(api_error(error)), "error")]

    def _read(self, event: GenerationEvent) -> list[BlockChange]:
        changes = self._blocks.read(self._output.read(event))
        return [*changes, *self._blocks.close()] if event.finish_reason else changes

    def timings(self, index: int = 0) -> Timings | UnsetType:
        """Only with `timings_per_token`."""
        return super().timings(index) if self._shows_timings else UNSET

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
