"""`POST /v1/chat/completions`. The types of its requests and responses are in `chat_types`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from cppbatch.chat.output_parser import Delta, ReasoningDelta, TextDelta, ToolCall, ToolCallStart
from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.request import GenerationEvent, TokenLogprob
from cppbatch.server.answer.llama_result import has_output
from cppbatch.server.answer.logprobs import ChatLogprobs, chat_token_logprobs
from cppbatch.server.answer.response import generation
from cppbatch.server.api.openai.chat_types import (
    CalledCustomTool,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatFinishReason,
    CustomDelta,
    FunctionDelta,
    ResponseCustomCall,
    ResponseMessage,
    ResponseToolCall,
    ToolCallDelta,
)
from cppbatch.server.api.openai.choices import ChoicesBuilder, Extras, logprobs_of, verbose_results
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.serving import ResolvedRequest, Serving

if TYPE_CHECKING:
    from typing_extensions import Unpack

routes = Routes()


@generation(
    routes,
    "/v1/chat/completions",
    ChatCompletionRequest,
    ChatCompletionResponse,
    in_batches=True,
    also=("/chat/completions",),
)
async def prepare_chat_completion(body: ChatCompletionRequest, serving: Serving) -> ChatCompletionBuilder:
    """Generate the next assistant message.

    Raises `InvalidRequest`.
    """
    serving.check(body)
    serving.check_size(body)
    builder = ChatCompletionBuilder(body, serving, await serving.resolve(body.turn(), body, "chatcmpl-"))
    builder.verbose = await verbose_results(body, builder.requests, serving)
    return builder


class ChatCompletionBuilder(ChoicesBuilder):
    """Builds the response of a chat completion."""

    def __init__(self, body: ChatCompletionRequest, serving: Serving, resolved: ResolvedRequest) -> None:
        super().__init__(body, serving, resolved)
        self._wants_logprobs = bool(body.wants_logprobs)
        self._chat = resolved.chat
        self._is_legacy = bool(body.legacy_functions)
        self._outputs: dict[int, AssistantOutput] = {}  # by the index of the completion
        self._writers: dict[int, _DeltaWriter] = {}

    def build(self, completions: list[list[GenerationEvent]]) -> ChatCompletionResponse:
        """Returns the chosen completions, parsed into content, reasoning and calls."""
        logprobs = [logprobs_of(events) for events in completions]
        choices = []
        for index, i in enumerate(self.select_choices(logprobs)):
            output = self._outputs[i] = AssistantOutput(self._chat)
            for event in completions[i]:
                output.read(event)
            choices.append(
                ChatChoice(
                    index=index,
                    message=_message(output, is_legacy=self._is_legacy),
                    logprobs=self._logprobs(logprobs[i]),
                    finish_reason=self._finish_reason(output),
                    seed=self.seed(i),
                )
            )
        return ChatCompletionResponse(choices=choices, **self.result_fields(completions))

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """A choice's first chunk has the role, the last one the finish reason."""
        chunks = self.progress_chunks(index, event)
        if not has_output(event):
            return chunks
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = AssistantOutput(self._chat)
            self._writers[index] = _DeltaWriter(is_legacy=self._is_legacy)
            chunks.append(self.chunk([self.empty_choice(index)]))
        written = map(self._writers[index].delta, output.read(event))
        deltas = [delta for delta in written if delta is not None]
        if event.logprobs and not deltas:  # tokens without visible text, such as tags
            deltas = [ChatDelta(content="")]
        logprobs = self._logprobs(event.logprobs) if event.logprobs else None
        per_token = self.stream_timings.per_token(event)
        for delta in deltas:
            choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs)
            chunks.append(self.chunk([choice], timings=per_token))
            logprobs = None  # the first chunk of an event has the log-probabilities of all its tokens
        if event.finish_reason:
            last = ChatChunkChoice(
                index=index, delta=ChatDelta(), finish_reason=self._finish_reason(output), seed=self.seed(index)
            )
            chunks.append(self.chunk([last], **self.end_fields(index)))
        return chunks

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens so far, over all choices."""
        return sum(output.reasoning_tokens for output in self._outputs.values())

    def _finish_reason(self, output: AssistantOutput) -> ChatFinishReason:
        assert output.finish_reason is not None
        is_call = self._is_legacy and output.finish_reason == "tool_calls"
        return "function_call" if is_call else output.finish_reason

    def empty_choice(self, index: int) -> ChatChunkChoice:
        """The start of a choice, with the role."""
        return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=None))

    def chunk(self, choices: list[ChatChunkChoice], **extras: Unpack[Extras]) -> ServerSentEvent:
        return ServerSentEvent(ChatCompletionChunk(choices=choices, **self.chunk_fields(extras)))

    def _logprobs(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return ChatLogprobs(content=chat_token_logprobs(entries)) if self._wants_logprobs else None


def _message(output: AssistantOutput, *, is_legacy: bool) -> ResponseMessage:
    """The whole message. `is_legacy`: with its first call as `function_call`."""
    said = output.message
    content = said.text if said.text or not said.calls else None
    reasoning = said.reasoning or UNSET
    if is_legacy and said.calls:
        called = CalledFunction(name=said.calls[0].name, arguments=said.calls[0].arguments)
        return ResponseMessage(content=content, reasoning_content=reasoning, function_call=called)
    return ResponseMessage(
        content=content, reasoning_content=reasoning, tool_calls=[_call(call) for call in said.calls] or UNSET
    )


def _call(call: ToolCall) -> ResponseToolCall | ResponseCustomCall:
    if call.is_custom:
        return ResponseCustomCall(id=call.id, custom=CalledCustomTool(name=call.name, input=call.arguments))
    return ResponseToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


class _DeltaWriter:
    """Builds the `delta` of a chunk for each delta of a message's output parser."""

    def __init__(self, *, is_legacy: bool) -> None:
        self._is_legacy = is_legacy
        self._custom: set[int] = set()  # indices of calls of custom tools

    def delta(self, delta: Delta) -> ChatDelta | None:
        """None: the delta is omitted, because a message with `function_call` has only one call."""
        if isinstance(delta, TextDelta):
            return ChatDelta(content=delta.text)
        if isinstance(delta, ReasoningDelta):
            return ChatDelta(reasoning_content=delta.text)
        name = delta.name if isinstance(delta, ToolCallStart) else UNSET
        text = "" if isinstance(delta, ToolCallStart) else delta.text
        if self._is_legacy:
            return None if delta.index else ChatDelta(function_call=FunctionDelta(name=name, arguments=text))
        if isinstance(delta, ToolCallStart) and delta.is_custom:
            self._custom.add(delta.index)
        is_custom = delta.index in self._custom
        call = ToolCallDelta(
            index=delta.index,
            id=delta.id if isinstance(delta, ToolCallStart) else UNSET,
            type=UNSET if not isinstance(delta, ToolCallStart) else "custom" if is_custom else "function",
            function=UNSET if is_custom else FunctionDelta(name=name, arguments=text),
            custom=CustomDelta(name=name, input=text) if is_custom else UNSET,
        )
        return ChatDelta(tool_calls=[call])
