"""The types of `POST /v1/responses`: its request, its response, the events of its stream."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.media_parts import MediaFields
from cppbatch.chat.tools import ToolChoice
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.llama_result import PromptProgress, Timings
from cppbatch.server.answer.logprobs import ChatTokenLogprob
from cppbatch.server.api.responses.tools import (
    ResponsesCustomTool,
    ResponsesFunction,
    ResponsesNamespace,
    ResponsesTool,
    ResponsesToolChoice,
    UsedTools,
    choice_of,
)
from cppbatch.server.fields.sampling import SamplingFields, SingleChoiceFields
from cppbatch.server.fields.structured import one_schema

Json = dict[str, Any]

# --- the request ----------------------------------------------------------------------------------------------------


class InputPart(MediaFields, kw_only=True):
    """A part of an item: text, an image or audio."""

    type: str
    """`input_text`, `output_text`, `input_image`, `input_audio` ..."""
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A message, a tool call, its output, or reasoning; its fields depend on its type."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    """For a message, or reasoning."""
    summary: list[InputPart] | None = None
    """For reasoning without content."""
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    """For a call of a tool in a namespace."""
    arguments: str | Json | None = None
    """For a tool call: a JSON object, or its text."""
    input: str | None = None
    """For a call of a custom tool: its text."""
    output: str | list[InputPart] | None = None
    """For the output of a tool call."""
    id: str | None = None
    """For a call of a tool of OpenAI's servers without `call_id`."""
    status: str | None = None
    """For a call of a tool of OpenAI's servers: what the model gets if the item has no output."""
    action: Json | None = None
    """For a call of a tool of OpenAI's servers: its arguments."""
    tools: list[ResponsesTool] | None = None
    """For `additional_tools` and `tool_search_output`: tools that are added to those of the request."""


class TextFormat(msgspec.Struct):
    """`text.format`: the answer format."""

    type: str = "text"
    """`text`, `json_object` or `json_schema`."""
    name: str | None = None
    description: str | None = None
    schema: Json | None = None
    """None: any JSON object."""
    strict: bool | None = None

    def answer_schema(self) -> Json | None:
        """The JSON schema of the answer, None for free text. Raises `InvalidRequest`."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.type != "json_schema":
            raise InvalidRequest("text.format.type", f"is {self.type!r}; it must be text, json_object or json_schema")
        return {"type": "object"} if self.schema is None else self.schema


class TextConfig(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """Ignored."""


class ReasoningConfig(msgspec.Struct):
    """`reasoning`."""

    effort: str | None = None
    """For the chat template: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`."""


LOGPROBS = "message.output_text.logprobs"
"""The value in `include` that requests log-probabilities."""

_STATEFUL_FIELDS = {
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "background": "wait for the answer, or stream it",
    "prompt": "send its text as instructions or input",
}
"""Fields that need stored responses, and what to do instead."""


class ResponsesRequest(SingleChoiceFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    _ALIASES: ClassVar[dict[str, str]] = {
        **SamplingFields._ALIASES,
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }

    input: str | list[InputItem]
    instructions: str | None = None
    """The system message."""
    max_output_tokens: int | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    """`none`, `auto` (default), `required`, a tool by name, or the allowed tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    thinking_budget: int | None = None
    """Maximum reasoning tokens; then the reasoning is closed and the answer starts. -1: no limit."""
    parse_special: bool | None = None
    """Read the texts of control tokens, such as `<|im_end|>`, in messages and tools as control tokens. Default: plain
    text, unless the server has --parse-special."""
    include: list[str] | None = None
    """`message.output_text.logprobs`; other values are ignored."""
    top_logprobs: int | None = None
    """Number of most likely tokens to return at each position, up to 20."""
    metadata: dict[str, str] | None = None
    """Returned unchanged."""
    user: str | None = None
    """Returned unchanged."""
    store: bool | None = None
    """Ignored: responses are not stored."""
    context_management: Any = None
    """Ignored: conversations are not shortened."""
    truncation: str | None = None
    """Ignored: prompts that are too long are refused."""
    previous_response_id: str | None = None
    """Must be absent: responses are not stored."""
    conversation: str | Json | None = None
    """Must be absent: responses are not stored."""
    background: bool | None = None
    """Must not be true: responses are not stored."""
    prompt: Json | None = None
    """Must be absent: prompts are not stored."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are returned."""
        return LOGPROBS in (self.include or []) or self.top_logprobs is not None

    def check_stateless(self) -> None:
        """Raises `InvalidRequest` for fields that need stored responses."""
        for field, instead in _STATEFUL_FIELDS.items():
            if getattr(self, field):
                raise InvalidRequest(field, f"is not supported: this server stores nothing; {instead}")

    @property
    def ignored(self) -> tuple[str, ...]:
        """The fields without effect that ask for something."""
        given = {
            "store": self.store,
            "context_management": self.context_management,
            "text.verbosity": self.text and self.text.verbosity not in (None, "medium"),
        }
        return tuple(name for name, value in given.items() if value)

    def used_tools(self) -> UsedTools:
        """The tools of the request and of its items. Raises `InvalidRequest`."""
        items = self.input if isinstance(self.input, list) else []
        added = {f"input[{i}].tools": item.tools for i, item in enumerate(items) if item.tools}
        return UsedTools(self.tools or [], added)

    def choice(self, tools: UsedTools) -> ToolChoice:
        """`tool_choice` and `parallel_tool_calls`. Raises `InvalidRequest`."""
        return choice_of(self.tool_choice or "auto", tools, parallel=self.parallel_tool_calls is not False)

    @property
    def format(self) -> TextFormat:
        """The format of the answer."""
        return (self.text and self.text.format) or TextFormat()

    def schema(self) -> Json | bool | None:
        """The schema of `text.format`."""
        if self.response_format:
            raise InvalidRequest("response_format", "belongs to another API; use text.format")
        return one_schema("text.format", self.format.answer_schema(), self)


# --- the response ---------------------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The content of a message."""

    text: str
    annotations: list[Any] = []
    """Always empty."""
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The content of a reasoning item."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A block of text."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]
    """One part; none when the item starts."""


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """A block of reasoning."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    """Always empty: the reasoning itself is returned."""
    content: list[ReasoningText]
    """One part; none when the item starts."""


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A tool call."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    """The tool's namespace; absent if it has none."""
    arguments: str
    """A JSON object, as text."""


class CustomToolCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    """The tool's namespace; absent if it has none."""
    input: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.input_tokens_details`."""

    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    image_tokens: int | UnsetType = UNSET
    """Prompt tokens of images; absent if there are none."""
    audio_tokens: int | UnsetType = UNSET
    """Prompt tokens of audio; absent if there are none."""
    cache_write_tokens: Literal[0] = 0


class ReasoningTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.output_tokens_details`."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why the answer is incomplete."""

    reason: Literal["max_output_tokens", "timeout"]


class ResponsesError(msgspec.Struct, frozen=True, kw_only=True):
    """Why the response failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponsesReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning` of the request."""

    effort: str | None
    summary: None = None


class ResponsesTextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`text.format` of the request."""

    type: str
    name: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    schema: Json | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class ResponsesText(msgspec.Struct, frozen=True, kw_only=True):
    """`text` of the request."""

    format: ResponsesTextFormat


class ResponsesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/responses`, not streamed; and the response in events of the stream.

    The fields from `model` on repeat the request, with defaults filled in.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    """`in_progress` and `failed`: only in a stream."""
    error: ResponsesError | None = None
    """Only with status `failed`."""
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem]
    usage: ResponsesUsage | None = None
    """None in a stream until the response has ended."""
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ResponsesReasoning
    background: Literal[False] = False
    store: Literal[False] = False
    temperature: float
    text: ResponsesText
    tool_choice: str | ResponsesToolChoice
    tools: list[ResponsesFunction | ResponsesCustomTool | ResponsesNamespace]
    """Without tools of OpenAI's servers."""
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None
    timings: Timings | UnsetType = UNSET
    """Absent in a stream, where the last event has it."""


# --- the events of a stream -----------------------------------------------------------------------------------------


class StreamTopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most likely tokens at a position; without its bytes in events."""

    token: str
    logprob: float | None


class StreamTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token with its log-probability; without its bytes in events."""

    token: str
    logprob: float | None
    top_logprobs: list[StreamTopLogprob]


class ResponsesEvent(msgspec.Struct, kw_only=True, tag_field="type", tag="response.event"):
    """The fields of every event. Its type is the tag of the class."""

    sequence_number: int = 0
    """Counts the events of the stream from 0."""
    timings: Timings | UnsetType = UNSET
    """In the last event, and with `timings_per_token` in the last event for each token."""
    prompt_progress: PromptProgress | UnsetType = UNSET
    """With `return_progress`, in `response.in_progress`."""


class _ResponseEvent(ResponsesEvent, kw_only=True, tag="response"):
    response: ResponsesResponse


class ResponseCreated(_ResponseEvent, kw_only=True, tag="response.created"):
    """The first event."""


class ResponseInProgress(_ResponseEvent, kw_only=True, tag="response.in_progress"):
    """The second event; with `return_progress`, also further events until the prompt is processed."""


class ResponseCompleted(_ResponseEvent, kw_only=True, tag="response.completed"):
    """The last event of a complete response."""


class ResponseIncomplete(_ResponseEvent, kw_only=True, tag="response.incomplete"):
    """The last event of an incomplete response."""


class ResponseFailed(_ResponseEvent, kw_only=True, tag="response.failed"):
    """The last event of a failed response, with the output so far."""


class OutputItemAdded(ResponsesEvent, kw_only=True, tag="response.output_item.added"):
    """An item starts, empty."""

    output_index: int
    item: OutputItem


class OutputItemDone(ResponsesEvent, kw_only=True, tag="response.output_item.done"):
    """An item has ended."""

    output_index: int
    item: OutputItem


class _ItemEvent(ResponsesEvent, kw_only=True, tag="response.item"):
    item_id: str
    output_index: int


class _ContentEvent(_ItemEvent, kw_only=True, tag="response.content"):
    content_index: int = 0
    """Items have one content part."""


class ContentPartAdded(_ContentEvent, kw_only=True, tag="response.content_part.added"):
    """The content of an item starts, empty."""

    part: OutputText | ReasoningText


class ContentPartDone(_ContentEvent, kw_only=True, tag="response.content_part.done"):
    """The content of an item has ended."""

    part: OutputText | ReasoningText


class OutputTextDelta(_ContentEvent, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[StreamTokenLogprob]


class OutputTextDone(_ContentEvent, kw_only=True, tag="response.output_text.done"):
    """All text of an item."""

    text: str
    logprobs: list[StreamTokenLogprob]


class ReasoningTextDelta(_ContentEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningTextDone(_ContentEvent, kw_only=True, tag="response.reasoning_text.done"):
    """All reasoning of an item."""

    text: str


class FunctionCallArgumentsDelta(_ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a tool call's arguments."""

    delta: str


class FunctionCallArgumentsDone(_ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """All arguments of a tool call."""

    arguments: str


class CustomToolCallInputDelta(_ItemEvent, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's text."""

    delta: str


class CustomToolCallInputDone(_ItemEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    """All text of a custom tool's call."""

    input: str
