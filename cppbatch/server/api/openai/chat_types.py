"""The types of `POST /v1/chat/completions`: its request, its response, the chunks of its stream."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.messages import (
    ChatMessage,
    ContentPart,
    Function,
    NamedFunction,
    Tool,
    ToolChoiceObject,
    check_variables,
    choice_of,
    conversation_of,
)
from cppbatch.chat.reasoning import check_budget, effort_variables
from cppbatch.chat.tools import ToolChoice
from cppbatch.engine.chats import FinishReasonName
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.llama_result import LlamaResponse, PromptProgress, Timings
from cppbatch.server.answer.logprobs import ChatLogprobs
from cppbatch.server.api.openai.choices import Usage, VerboseFields
from cppbatch.server.fields.sampling import SamplingFields

Json = dict[str, Any]

# --- the request ----------------------------------------------------------------------------------------------------


class Prediction(msgspec.Struct):
    """`prediction`: text that makes up most of the expected answer, such as a file to edit."""

    content: str | list[ContentPart]
    type: Literal["content"] = "content"

    def text(self) -> str:
        """The text of all parts. Raises `InvalidRequest`."""
        if isinstance(self.content, str):
            return self.content
        for i, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(f"prediction.content[{i}]", f"is of type {part.type!r}; only text is supported")
        return "".join(part.text or "" for part in self.content)


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
    """Number of most likely tokens to return at each position, up to 20; requires `logprobs`."""
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    """`none`, `auto` (default), `required`, a tool by name, or the allowed tools."""
    legacy_functions: list[Function] | None = msgspec.field(default=None, name="functions")
    """OpenAI's predecessor of `tools`, until 2023: the answer has at most one call, in `function_call`."""
    function_call: str | NamedFunction | None = None
    """With `functions`: `none`, `auto` (default), or a function by name."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per message."""
    reasoning_effort: str | None = None
    """For the chat template: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`."""
    thinking_budget: int | None = None
    """Maximum reasoning tokens; then the reasoning is closed and the answer starts. -1: no limit."""
    thinking_budget_tokens: int | None = None
    """llama-server's name for `thinking_budget`."""
    reasoning_budget_tokens: int | None = None
    """llama-server's newer name for `thinking_budget`."""
    reasoning_budget_message: str | None = None
    """llama-server's: text before the end of reasoning that has used up its tokens. Default:
    --reasoning-budget-message."""
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = None
    """llama-server's: none leaves reasoning in the content. Default: --reasoning-format."""
    chat_template_kwargs: Json | None = None
    """Additional chat template variables, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """False: continue the assistant's last message; after another message, do not start one. True: start a new
    assistant message, even after one."""
    continue_final_message: bool | None = None
    """vLLM's name for the opposite. True: continue the last message."""
    parse_special: bool | None = None
    """Read the texts of control tokens, such as `<|im_end|>`, in messages and tools as control tokens. Default: plain
    text, unless the server has --parse-special."""
    prediction: Prediction | None = None
    """Text that the answer will probably contain. Makes the answer faster, not different."""
    user: str | None = None
    """Not used."""

    def options(self) -> Json:
        """The given fields of `GenerationRequest`, with `prediction`."""
        return super().options() | ({"prediction": self.prediction.text()} if self.prediction else {})

    def turn(self) -> ChatTurn:
        """The conversation. Raises `InvalidRequest`."""
        effort = effort_variables("reasoning_effort", self.reasoning_effort)
        if self.legacy_functions and self.tools:
            raise InvalidRequest("functions", "cannot be combined with tools; pass the functions as tools")
        tools = [Tool(function=each) for each in self.legacy_functions or ()] or self.tools or []
        return ChatTurn(
            conversation_of(self.messages),
            tools=[tool.as_dict(f"tools[{i}]") for i, tool in enumerate(tools)],
            choice=self._choice(),
            schema=self.schema(),
            variables=check_variables(effort | (self.chat_template_kwargs or {})),
            thinking_tokens=check_budget(
                thinking_budget=self.thinking_budget,
                reasoning_budget_tokens=self.reasoning_budget_tokens,
                thinking_budget_tokens=self.thinking_budget_tokens,
            ),
            thinking_message=self.reasoning_budget_message,
            reads_reasoning=None if self.reasoning_format is None else self.reasoning_format != "none",
            continue_final_message=self._continues_message(),
            add_generation_prompt=self.add_generation_prompt is not False,
            parse_special=self.parse_special,
            field_names={"response_format": self.constraint_field("response_format")},
        )

    def _choice(self) -> ToolChoice:
        if self.function_call is not None and not self.legacy_functions:
            raise InvalidRequest("function_call", "requires functions; with tools, use tool_choice")
        if self.legacy_functions:
            return self._legacy_choice()
        return choice_of(self.tool_choice or "auto", parallel=self.parallel_tool_calls is not False)

    def _legacy_choice(self) -> ToolChoice:
        if isinstance(self.function_call, NamedFunction):
            return ToolChoice(mode="required", name=self.function_call.name, parallel=False)
        if self.function_call == "none":
            return ToolChoice(mode="none")
        if self.function_call not in (None, "auto"):
            message = f"is {self.function_call!r:.80}; it must be none, auto, or an object that names a function"
            raise InvalidRequest("function_call", message)
        return ToolChoice(parallel=False)

    def _continues_message(self) -> bool | None:
        if self.add_generation_prompt and self.continue_final_message:
            message = "cannot be combined with add_generation_prompt: the last message is either complete or continued"
            raise InvalidRequest("continue_final_message", message)
        return False if self.add_generation_prompt else self.continue_final_message


# --- the response ---------------------------------------------------------------------------------------------------

ChatFinishReason = FinishReasonName | Literal["function_call"]


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a tool call."""

    name: str
    arguments: str
    """A JSON object, as text."""


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
    """None if the message only has tool calls."""
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
    """A request with this seed reproduces the message."""


class ChatCompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`, not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    """Changes with versions and settings that may affect the text for the same seed."""
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    """For the first choice."""
    verbose: LlamaResponse | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    """With `verbose`: for the first choice."""


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
    """The part of the message that a chunk adds."""

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
    usage: Usage | UnsetType = UNSET
    """With `stream_options.include_usage`: in the last chunk, which has no choices. Other chunks have none, as in
    llama-server: OpenAI's API has null there, which some clients take for an answer without tokens."""
    timings: Timings | UnsetType = UNSET
    """In the chunk with the finish reason, in the one with the usage (for the first choice), and with
    `timings_per_token` in others."""
    prompt_progress: PromptProgress | UnsetType = UNSET
    """With `return_progress`, before the first token."""
    verbose: LlamaResponse | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    """With `verbose`: in the chunk with the finish reason."""
