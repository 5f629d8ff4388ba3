"""The types of `POST /v1/chat/completions`: its request, its response, the chunks of its stream."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.tools import TOOL_CHOICE_MODES, ToolChoice
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.server.assistant_output import FinishReasonName, effort_variables
from cppbatch.server.llama_result import LlamaResponse
from cppbatch.server.openai.choices import Usage, VerboseFields
from cppbatch.server.response_logprobs import ChatLogprobs
from cppbatch.server.sampling_fields import SamplingFields
from cppbatch.server.timings import PromptProgress, Timings

Json = dict[str, Any]

# --- the request ----------------------------------------------------------------------------------------------------

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(msgspec.Struct):
    """A part of a message. Only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class RequestFunctionCall(msgspec.Struct):
    """The function of a tool call."""

    name: str
    arguments: str | Json = "{}"
    """A JSON object, or its text."""


class RequestToolCall(msgspec.Struct):
    """A tool call that the assistant has made."""

    function: RequestFunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """The assistant's reasoning before its answer."""
    tool_calls: list[RequestToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    def as_dict(self, field: str) -> Json:
        """The message as chat templates expect it. `field`: its name in errors. Raises `InvalidRequest`."""
        if self.role not in _ROLES:
            raise InvalidRequest(f"{field}.role", f"is {self.role!r}; it must be one of {', '.join(_ROLES)}")
        if isinstance(self.content, list):
            for i, part in enumerate(self.content):
                if part.type not in ("text", "refusal") or (part.text is None and part.refusal is None):
                    raise InvalidRequest(f"{field}.content[{i}]", f"is of type {part.type!r}; only text can be read")
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{field}.content", "is required")
        message: Json = {"role": self.role, "content": self._content()}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [msgspec.to_builtins(call) for call in self.tool_calls]
        return message

    def _content(self) -> str | list[Json] | None:
        if isinstance(self.content, list):
            return [{"type": "text", "text": part.text or part.refusal or ""} for part in self.content]
        return self.refusal if self.content is None else self.content


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the assistant may call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool of the request. Only functions are supported."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct):
    """`tool_choice`: the function that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class Prediction(msgspec.Struct):
    """`prediction`: text that most of the answer is known to contain, such as a file to change."""

    content: str | list[ContentPart]
    type: Literal["content"] = "content"

    def text(self) -> str:
        """The text of all parts. Raises `InvalidRequest`."""
        if isinstance(self.content, str):
            return self.content
        for i, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(f"prediction.content[{i}]", f"is of type {part.type!r}; only text can be read")
        return "".join(part.text or "" for part in self.content)


_RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")


class ChatCompletionRequest(VerboseFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    _ALIASES: ClassVar[dict[str, str]] = {
        **SamplingFields._ALIASES,
        "max_tokens": "max_completion_tokens",  # OpenAI's newer name
        "logprobs": "top_logprobs",
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    wants_logprobs: bool | None = msgspec.field(default=None, name="logprobs")
    top_logprobs: int | None = None
    """How many of the likeliest tokens to show at each position, to 20; `logprobs` must be true."""
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    """none, auto (the default), required, or one function by its name."""
    deprecated_functions: list[Any] | None = msgspec.field(default=None, name="functions")
    """OpenAI's form of `tools` until 2023. Must be empty."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per message."""
    reasoning_effort: str | None = None
    """For the chat template: none, minimal, low, medium, high, xhigh or max."""
    chat_template_kwargs: Json | None = None
    """Further variables for the chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """False: the last message is continued. True: the assistant begins a new message, even after its own."""
    prediction: Prediction | None = None
    """Text that the answer will probably contain. It makes the answer faster, not different."""
    user: str | None = None
    """Not used."""

    def params(self, **defaults: Any) -> SamplingParams:
        """As in `SamplingFields`."""
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InvalidRequest("top_logprobs", "is only of use when logprobs is true")
        wanted = {"logprobs": 0} if self.wants_logprobs else {}
        return super().params(**defaults, **wanted)

    def options(self) -> Json:
        """As in `SamplingFields`."""
        return super().options() | ({"prediction": self.prediction.text()} if self.prediction else {})

    def conversation(self) -> list[Json]:
        """The messages as chat templates expect them. Raises `InvalidRequest`."""
        if not self.messages:
            raise InvalidRequest("messages", "is empty; give at least one message")
        return [message.as_dict(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def functions(self) -> list[Json]:
        """The tools as chat templates expect them. Raises `InvalidRequest`."""
        if self.deprecated_functions:
            raise InvalidRequest("functions", "is not served any more; give `tools`, each with one function")
        return [msgspec.to_builtins(tool) for tool in self.tools or []]

    def choice(self) -> ToolChoice:
        """`tool_choice` and `parallel_tool_calls`. Raises `InvalidRequest`."""
        wanted = self.tool_choice or "auto"
        if isinstance(wanted, NamedTool):
            return ToolChoice(mode="required", name=wanted.function.name, parallel=False)
        for mode in TOOL_CHOICE_MODES:
            if wanted == mode:
                return ToolChoice(mode=mode, parallel=self.parallel_tool_calls is not False)
        modes = ", ".join(TOOL_CHOICE_MODES)
        raise InvalidRequest("tool_choice", f"is {wanted!r}; it must be {modes} or a function by its name")

    def template_variables(self) -> Json:
        """The variables of the chat template beside messages and tools. Raises `InvalidRequest`."""
        variables = effort_variables("reasoning_effort", self.reasoning_effort) | (self.chat_template_kwargs or {})
        if reserved := [name for name in _RESERVED_VARIABLES if name in variables]:
            raise InvalidRequest(f"chat_template_kwargs.{reserved[0]}", "has a field of its own in the request")
        return variables


# --- the response ---------------------------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a tool call."""

    name: str
    arguments: str
    """A JSON object as text."""


class ResponseToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ResponseMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """None if the message has only tool calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """The reasoning before the answer."""
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    seed: int
    """A request with this seed generates the same message."""


class ChatCompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`, not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    """Changes with the versions and settings that may change a text of the same seed."""
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    """Of the first choice."""
    verbose: LlamaResponse | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    """With `verbose`: of the first choice."""


# --- the stream -----------------------------------------------------------------------------------------------------


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More of a tool call's function: its name first, then its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More of a tool call; `id` and `type` come first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    """Only in the first chunk of the choice."""
    content: str | UnsetType | None = UNSET
    """None in the first chunk of the choice."""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """More of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonName | None = None
    """Only in the last chunk of the choice."""
    seed: int | UnsetType = UNSET
    """Only in the last chunk of the choice."""


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    """With `stream_options.include_usage`: null, and in the last chunk, which has no choices, the usage."""
    timings: Timings | UnsetType = UNSET
    """In the chunk with the finish reason, in the one with the usage (of the first choice), and with
    `timings_per_token` in others."""
    prompt_progress: PromptProgress | UnsetType = UNSET
    """With `return_progress`, before the first token."""
    verbose: LlamaResponse | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    """With `verbose`: in the chunk with the finish reason."""
