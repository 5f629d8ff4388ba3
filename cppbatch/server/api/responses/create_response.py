"""`POST /v1/responses`. Nothing is stored, so there are no routes to fetch or delete a response."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.lark_grammar import INPUT
from cppbatch.chat.reasoning import check_budget, effort_variables
from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.llama_result import StreamTimings, Timings, timings
from cppbatch.server.answer.logprobs import TokenSplitter
from cppbatch.server.answer.response import ContentBlocks, PreparedRequest, ResponseBuilder, generation, media_details
from cppbatch.server.api.responses.output_items import OutputItems
from cppbatch.server.api.responses.tools import UsedTools
from cppbatch.server.api.responses.types import (
    IncompleteDetails,
    InputItem,
    InputPart,
    InputTokensDetails,
    Json,
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
from cppbatch.server.models.serving import ResolvedTurn, Serving

routes = Routes()


@generation(routes, "/v1/responses", ResponsesRequest, ResponsesResponse, in_batches=True, also=("/responses",))
async def prepare_response(body: ResponsesRequest, serving: Serving) -> PreparedRequest:
    """Generate the next assistant message, in the Responses API.

    Raises `InvalidRequest`.
    """
    serving.check(body)
    serving.check_size(body)
    tools = body.used_tools()
    turn = await serving.resolve(response_turn(body, tools), body, "resp_")
    return PreparedRequest(
        turn.requests,
        ResponsesBuilder(body, serving.name, turn, tools),
        stream=bool(body.stream),
        field_names=turn.field_names,
        ignored=(*body.ignored, *tools.left_out),
    )


class ResponsesBuilder(ResponseBuilder):
    """Builds the response of `/v1/responses`."""

    def __init__(self, body: ResponsesRequest, model: str, turn: ResolvedTurn, tools: UsedTools) -> None:
        super().__init__()
        self._started = _initial_response(turn.id, body, model, turn.requests[0].params, tools)
        self._output = AssistantOutput(turn.chat)
        self._blocks = ContentBlocks()
        self._items = OutputItems(tools)
        self._splitter = TokenSplitter() if body.wants_logprobs else None
        self._n_events = 0
        self._stream_timings = StreamTimings(body)
        self._returns_progress = bool(body.return_progress)

    def build(self, completions: list[list[GenerationEvent]]) -> ResponsesResponse:
        """Returns the response with all items."""
        for event in completions[0]:
            self._read(event)
        return msgspec.structs.replace(self._final_response(), timings=self._timings())

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
        return self._to_sse(last(response=response, timings=self._timings()))

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

    def _timings(self) -> Timings | UnsetType:
        usage = self.last_events[0].usage
        return timings(usage) if usage else UNSET

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


# --- input conversion ------------------------------------------------------------------------------------------------
# Converts the request body to a `ChatTurn`: its items become messages, as chat templates expect.


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
