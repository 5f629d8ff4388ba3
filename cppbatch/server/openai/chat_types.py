"""The types of `POST /v1/chat/completions`: its request, its response, the chunks of its stream."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.escaped_lark import INPUT
from cppbatch.chat.tools import ToolChoice, allowed_choice, tool_choice_of
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


class RequestCustomCall(msgspec.Struct):
    """The custom tool of a tool call."""

    name: str
    input: str


class RequestToolCall(msgspec.Struct):
    """A tool call that the assistant has made."""

    function: RequestFunctionCall | None = None
    custom: RequestCustomCall | None = None
    """Of a custom tool."""
    id: str | None = None
    type: str = "function"

    def as_dict(self, field: str) -> Json:
        """The call as chat templates expect it. `field`: its name in errors. Raises `InvalidRequest`."""
        called = self.function
        if called is None and self.custom:
            called = function_call_of(self.custom.name, self.custom.input)
        if called is None:
            raise InvalidRequest(f"{field}.function", "is required")
        return {"function": msgspec.to_builtins(called), "id": self.id, "type": "function"}


def function_call_of(name: str, text: str) -> RequestFunctionCall:
    """The call of a custom tool as the model writes it."""
    return RequestFunctionCall(name=name, arguments={INPUT: text})


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """The assistant's reasoning before its answer."""
    tool_calls: list[RequestToolCall] | None = None
    function_call: RequestFunctionCall | None = None
    """The call in OpenAI's form until 2023."""
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
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.as_dict(f"{field}.tool_calls[{i}]") for i, call in calls]
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


class CustomGrammar(msgspec.Struct):
    """The grammar of a custom tool's text."""

    syntax: str
    """lark or regex."""
    definition: str


class CustomFormat(msgspec.Struct, omit_defaults=True):
    """The format of a custom tool's text."""

    type: str
    """text or grammar."""
    grammar: CustomGrammar | None = None


class CustomTool(msgspec.Struct, omit_defaults=True):
    """A tool that takes a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None

    def as_tool(self, field: str) -> Json:
        """OpenAI's object of the tool. `field`: its name in errors. Raises `InvalidRequest`."""
        if self.format and self.format.type == "grammar" and self.format.grammar is None:
            raise InvalidRequest(f"{field}.format.grammar", "is required")
        return {"type": "custom", "custom": msgspec.to_builtins(self)}


class Tool(msgspec.Struct):
    """A tool of the request."""

    type: Literal["function", "custom"] = "function"
    function: Function | None = None
    custom: CustomTool | None = None

    def as_dict(self, field: str) -> Json:
        """OpenAI's object of the tool. `field`: its name in errors. Raises `InvalidRequest`."""
        if self.type == "custom" and self.custom:
            return self.custom.as_tool(f"{field}.custom")
        if self.type == "function" and self.function:
            return {"type": "function", "function": msgspec.to_builtins(self.function)}
        raise InvalidRequest(f"{field}.{self.type}", "is required")


class NamedFunction(msgspec.Struct):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct):
    """A tool by its name."""

    type: str = "function"
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    def tool_name(self, field: str) -> str:
        """The name. `field`: in errors. Raises `InvalidRequest`."""
        named = {"function": self.function, "custom": self.custom}.get(self.type)
        if named is None:
            raise InvalidRequest(field, f"is of type {self.type!r:.80}; it must name a function or a custom tool")
        return named.name


class AllowedTools(msgspec.Struct):
    """The tools that may be called."""

    tools: list[NamedTool]
    mode: str = "auto"
    """auto or required."""


class ToolChoiceObject(NamedTool):
    """`tool_choice`: the tool that must be called, or the tools that may be (type allowed_tools)."""

    allowed_tools: AllowedTools | None = None


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
    tool_choice: str | ToolChoiceObject | None = None
    """none, auto (the default), required, one tool by its name, or the tools that are allowed."""
    legacy_functions: list[Function] | None = msgspec.field(default=None, name="functions")
    """OpenAI's form of `tools` until 2023: the answer has at most one call, as `function_call`."""
    function_call: str | NamedFunction | None = None
    """With `functions`: none, auto (the default), or one function by its name."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per message."""
    reasoning_effort: str | None = None
    """For the chat template: none, minimal, low, medium, high, xhigh or max."""
    chat_template_kwargs: Json | None = None
    """Further variables for the chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """False: the last message is continued. True: the assistant begins a new message, even after its own."""
    continue_final_message: bool | None = None
    """vLLM's name for the same: true: the last message is continued."""
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
        messages = [message.as_dict(f"messages[{i}]") for i, message in enumerate(self.messages)]
        call_id = ""
        for i, message in enumerate(self.messages):  # OpenAI's form until 2023
            if message.function_call:
                call_id = f"call{i:05}"  # nine letters and digits, as some templates demand
                call = {"function": msgspec.to_builtins(message.function_call), "id": call_id, "type": "function"}
                messages[i]["tool_calls"] = [call]
            elif message.role == "function":
                messages[i] |= {"role": "tool", "tool_call_id": call_id}
        return messages

    def functions(self) -> list[Json]:
        """The tools as chat templates expect them. Raises `InvalidRequest`."""
        if self.legacy_functions and self.tools:
            raise InvalidRequest("functions", "cannot be used together with tools; give the functions as tools")
        if self.legacy_functions:
            return [{"type": "function", "function": msgspec.to_builtins(each)} for each in self.legacy_functions]
        return [tool.as_dict(f"tools[{i}]") for i, tool in enumerate(self.tools or [])]

    def choice(self) -> ToolChoice:
        """`tool_choice` and `parallel_tool_calls`. Raises `InvalidRequest`."""
        if self.function_call is not None and not self.legacy_functions:
            raise InvalidRequest("function_call", "needs functions; with tools give tool_choice")
        if self.legacy_functions:
            return self._legacy_choice()
        wanted, parallel = self.tool_choice or "auto", self.parallel_tool_calls is not False
        if isinstance(wanted, str):
            return tool_choice_of(wanted, parallel=parallel)
        if wanted.type != "allowed_tools":
            return ToolChoice(mode="required", name=wanted.tool_name("tool_choice"), parallel=False)
        if wanted.allowed_tools is None:
            raise InvalidRequest("tool_choice.allowed_tools", "is required")
        field, allowed = "tool_choice.allowed_tools", wanted.allowed_tools
        names = [tool.tool_name(f"{field}.tools[{i}]") for i, tool in enumerate(allowed.tools)]
        return allowed_choice(f"{field}.mode", allowed.mode, names, parallel=parallel)

    def _legacy_choice(self) -> ToolChoice:
        if isinstance(self.function_call, NamedFunction):
            return ToolChoice(mode="required", name=self.function_call.name, parallel=False)
        if self.function_call == "none":
            return ToolChoice(mode="none")
        if self.function_call not in (None, "auto"):
            message = f"is {self.function_call!r:.80}; it must be none, auto or a function by its name"
            raise InvalidRequest("function_call", message)
        return ToolChoice(parallel=False)

    @property
    def continues_message(self) -> bool | None:
        """Whether the last message is continued; None: if it is the assistant's. Raises `InvalidRequest`."""
        if self.add_generation_prompt and self.continue_final_message:
            message = "cannot be true together with add_generation_prompt: the last message either ends or goes on"
            raise InvalidRequest("continue_final_message", message)
        if self.add_generation_prompt is None:
            return self.continue_final_message
        return not self.add_generation_prompt

    def template_variables(self) -> Json:
        """The variables of the chat template beside messages and tools. Raises `InvalidRequest`."""
        variables = effort_variables("reasoning_effort", self.reasoning_effort) | (self.chat_template_kwargs or {})
        if reserved := [name for name in _RESERVED_VARIABLES if name in variables]:
            raise InvalidRequest(f"chat_template_kwargs.{reserved[0]}", "has a field of its own in the request")
        return variables


# --- the response ---------------------------------------------------------------------------------------------------

ChatFinishReason = FinishReasonName | Literal["function_call"]


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a tool call."""

    name: str
    arguments: str
    """A JSON object as text."""


class ResponseToolCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool call of the assistant."""

    id: str
    function: CalledFunction


class CalledCustomTool(msgspec.Struct, frozen=True, kw_only=True):
    """The custom tool of a tool call."""

    name: str
    input: str


class ResponseCustomCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A call of a custom tool."""

    id: str
    custom: CalledCustomTool


class ResponseMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """None if the message has only tool calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """The reasoning before the answer."""
    tool_calls: list[ResponseToolCall | ResponseCustomCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    """The call, if the request has `functions`."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
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


class CustomDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More of a custom tool's call: its name first, then its text."""

    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More of a tool call; `id` and `type` come first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    """Only in the first chunk of the choice."""
    content: str | UnsetType | None = UNSET
    """None in the first chunk of the choice."""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET
    """More of the call, if the request has `functions`."""


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """More of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
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
