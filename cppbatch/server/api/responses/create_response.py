"""`POST /v1/responses`. Nothing is stored, so there are no routes to fetch or delete a response."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationEvent
from cppbatch.server.answer.llama_result import StreamTimings
from cppbatch.server.answer.logprobs import TokenSplitter
from cppbatch.server.answer.response import ContentBlocks, ResponseBuilder, generation, media_details
from cppbatch.server.api.responses.conversion import response_turn
from cppbatch.server.api.responses.output_items import OutputItems
from cppbatch.server.api.responses.tools import UsedTools
from cppbatch.server.api.responses.types import (
    IncompleteDetails,
    InputTokensDetails,
    ReasoningTokensDetails,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponsesError,
    ResponsesEvent,
    ResponsesReasoning,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesText,
    ResponsesTextFormat,
    ResponsesUsage,
    TextFormat,
)
from cppbatch.server.http.api_errors import api_error
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.serving import ResolvedRequest, Serving

routes = Routes()


@generation(routes, "/v1/responses", ResponsesRequest, ResponsesResponse, in_batches=True, also=("/responses",))
async def prepare_response(body: ResponsesRequest, serving: Serving) -> ResponsesBuilder:
    """Generate the next assistant message, in the Responses API.

    Raises `InvalidRequest`.
    """
    serving.check(body)
    serving.check_size(body)
    tools = body.used_tools()
    return ResponsesBuilder(body, serving.name, await serving.resolve(response_turn(body, tools), body, "resp_"), tools)


class ResponsesBuilder(ResponseBuilder):
    """Builds the response of `/v1/responses`."""

    def __init__(self, body: ResponsesRequest, model: str, resolved: ResolvedRequest, tools: UsedTools) -> None:
        super().__init__(resolved, stream=body.stream, ignored=(*body.ignored, *tools.left_out))
        self._started = _initial_response(resolved.id, body, model, resolved.requests[0].params, tools)
        self._output = AssistantOutput(resolved.chat)
        self._blocks = ContentBlocks()
        self._items = OutputItems(tools)
        self._splitter = TokenSplitter() if body.wants_logprobs else None
        self._n_events = 0
        self._stream_timings = StreamTimings(body)
        self._returns_progress = bool(body.return_progress)

    def build(self, completions: list[list[GenerationEvent]]) -> ResponsesResponse:
        for event in completions[0]:
            self._read(event)
        return msgspec.structs.replace(self._final_response(), timings=self.timings())

    def stream_start(self) -> list[ServerSentEvent]:
        """Returns `response.created`, and `response.in_progress` unless the next event includes it."""
        created = ResponseCreated(response=self._started)
        if self._returns_progress:  # included in the next event
            return self._to_sse(created)
        return self._to_sse(created, ResponseInProgress(response=self._started))

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """Returns the events of the items, after one with the prompt's progress."""
        progress, per_token = self._stream_timings.progress(index, event), self._stream_timings.per_token(event)
        events: list[ResponsesEvent] = []
        if progress is not UNSET:
            events.append(ResponseInProgress(response=self._started, prompt_progress=progress, timings=per_token))
        if read := self._read(event):
            read[-1].timings = per_token
        return self._to_sse(*events, *read)

    def stream_end(self) -> list[ServerSentEvent]:
        """Returns `response.completed` or `response.incomplete`."""
        response = self._final_response()
        last = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        return self._to_sse(last(response=response, timings=self.timings()))

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """Returns `response.failed` with the output so far."""
        failure = api_error(error)
        self._items.apply(self._blocks.close(), status="incomplete")
        response = msgspec.structs.replace(
            self._started,
            status="failed",
            error=ResponsesError(
                code="server_error" if failure.status >= 500 else "invalid_prompt", message=failure.message
            ),
            output=self._items.items(),
        )
        return self._to_sse(ResponseFailed(response=response))

    def _read(self, event: GenerationEvent) -> list[ResponsesEvent]:
        """The events of the API for an event of the engine."""
        events: list[ResponsesEvent] = []
        for part in self._splitter.split(event) if self._splitter else [event]:
            changes = self._blocks.read(self._output.read(part))
            events += self._items.apply(changes, part.logprobs if self._splitter else None)
        if event.finish_reason:
            closed = self._blocks.close()
            is_whole = self._is_complete and not self._output.has_cut_call
            events += self._items.apply(closed, status="completed" if is_whole else "incomplete")
        return events

    def _to_sse(self, *events: ResponsesEvent) -> list[ServerSentEvent]:
        """The events, numbered and named after their types."""
        for event in events:
            event.sequence_number = self._n_events
            self._n_events += 1
        return [ServerSentEvent(event, str(event.__struct_config__.tag)) for event in events]

    @property
    def _is_complete(self) -> bool:
        return self._output.finish_reason in ("stop", "tool_calls")

    def _final_response(self) -> ResponsesResponse:
        ended = msgspec.structs.replace(self._started, output=self._items.items(), usage=self._usage())
        if self._is_complete:
            return msgspec.structs.replace(ended, status="completed", completed_at=int(time.time()))
        details = IncompleteDetails(
            reason="timeout" if self._output.finish_reason == "timeout" else "max_output_tokens"
        )
        return msgspec.structs.replace(ended, status="incomplete", incomplete_details=details)

    def _usage(self) -> ResponsesUsage:
        counts = self.token_counts()
        return ResponsesUsage(
            input_tokens=counts.prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached, **media_details(counts)),
            output_tokens=counts.completion,
            output_tokens_details=ReasoningTokensDetails(reasoning_tokens=self._output.reasoning_tokens),
            total_tokens=counts.prompt + counts.completion,
        )


def _initial_response(
    response_id: str, body: ResponsesRequest, model: str, params: SamplingParams, tools: UsedTools
) -> ResponsesResponse:
    """The response at its start: the request's settings, without output."""
    return ResponsesResponse(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        output=[],
        model=model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ResponsesReasoning(effort=body.reasoning.effort if body.reasoning else None),
        temperature=params.temperature,
        text=ResponsesText(format=_format(body.format)),
        tool_choice=body.tool_choice or "auto",
        tools=tools.echo,
        top_logprobs=params.logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )


def _format(wanted: TextFormat) -> ResponsesTextFormat:
    """The request's `text.format`, without fields that were not given. A schema without a name is named `answer`."""
    name = "answer" if wanted.name is None and wanted.type == "json_schema" else wanted.name
    return ResponsesTextFormat(
        type=wanted.type,
        name=UNSET if name is None else name,
        description=UNSET if wanted.description is None else wanted.description,
        schema=UNSET if wanted.schema is None else wanted.schema,
        strict=UNSET if wanted.strict is None else wanted.strict,
    )
