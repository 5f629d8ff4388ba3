"""The types of `POST /v1/messages` and `/v1/messages/count_tokens`: requests, responses, events of the stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.tools import ToolChoice, ToolChoiceMode
from cppbatch.engine.request import UsageEvents
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.llama_result import PromptProgress, Timings
from cppbatch.server.fields.sampling import SamplingFields, SingleChoiceFields
from cppbatch.server.fields.structured import one_schema
from cppbatch.server.http.api_errors import ThreadUnsupported

Json = dict[str, Any]

# --- requests -------------------------------------------------------------------------------------------------------


class ImageSource(msgspec.Struct):
    """The location of an image, or a document."""

    type: str
    """`base64` or `url`; for a document `base64` or `text`."""
    media_type: str | None = None
    """Ignored: the image type is detected from its bytes."""
    data: str | None = None
    """For types `base64` and `text`."""
    url: str | None = None
    """For type `url`: a data URL, or a URL that the server may fetch (--allowed-media-domains)."""

    def url_or_data(self, field: str) -> tuple[str, str]:
        """The field name for errors, and its URL or base64 data. Raises `InvalidRequest`."""
        if self.type not in ("base64", "url"):
            raise InvalidRequest(f"{field}.type", f"is {self.type!r:.80}; it must be base64 or url")
        name, given = ("data", self.data) if self.type == "base64" else ("url", self.url)
        if not given:
            raise InvalidRequest(f"{field}.{name}", "is required")
        return f"{field}.{name}", given


class RequestBlock(msgspec.Struct):
    """A content block of a message; its fields depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    """The arguments of a tool call."""
    tool_use_id: str | None = None
    content: str | list[RequestBlock] | None = None
    """The result of a tool call."""
    is_error: bool | None = None
    source: ImageSource | None = None
    """The source of an image or a document."""
    title: str | None = None
    """The title of a document. Like the next field, it becomes text before the document's."""
    context: str | None = None
    citations: Json | None = None
    """Ignored."""
    tool_name: str | None = None
    """For a `tool_reference` in the result of a tool call: a deferred tool that may be called from then on."""


class RequestMessage(msgspec.Struct):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[RequestBlock]


class MessagesTool(msgspec.Struct):
    """A function that the assistant may call. Tools of Anthropic's own types (`web_search_20250305` ...) are left
    out."""

    name: str = ""
    type: str | None = None
    """Absent, or `custom`."""
    description: str | None = None
    input_schema: Json | None = None
    """The JSON schema of its arguments."""
    defer_loading: bool | None = None
    """True: the model gets it only after a `tool_reference`."""


class MessagesToolChoice(msgspec.Struct):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """For type `tool`: the tool to call."""
    disable_parallel_tool_use: bool | None = None
    """True: at most one call per message."""


class ThinkingConfig(msgspec.Struct):
    """Whether the model reasons before it answers."""

    type: str
    """`disabled`; any other value enables reasoning."""
    budget_tokens: int | None = None
    """Maximum reasoning tokens; then the reasoning is closed and the answer starts."""


class OutputFormat(msgspec.Struct):
    """The answer format."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct):
    """Effort and answer format."""

    effort: str | None = None
    """For the chat template: `low`, `medium`, `high`, `xhigh` or `max`."""
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct):
    """An edit of the conversation, as defined by Anthropic's API."""

    type: str
    keep: str | Json | None = None
    """`all`: the edit has no effect."""


class ContextManagement(msgspec.Struct):
    """`context_management`."""

    edits: list[ContextEdit] | None = None


_CUSTOM = (None, "custom")
"""The types of tools that the client runs, with a schema."""
_MODES: dict[str, ToolChoiceMode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class CountTokensRequest(SingleChoiceFields, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: the fields that form the prompt. A `/v1/messages` body is also
    valid."""

    _ALIASES: ClassVar[dict[str, str]] = {**SamplingFields._ALIASES, "stop": "stop_sequences"}

    messages: list[RequestMessage]
    system: str | list[RequestBlock] | None = None
    stop_sequences: list[str] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    parse_special: bool | None = None
    """Read the texts of control tokens, such as `<|im_end|>`, in messages and tools as control tokens. Default: plain
    text, unless the server has --parse-special."""
    metadata: Json | None = None
    """Ignored, like the following fields, which are for Anthropic's own services."""
    cache_control: Json | None = None
    speed: str | None = None
    inference_geo: str | None = None
    thread: Json | None = None
    """Must be absent: conversations are not stored."""
    context_management: ContextManagement | None = None
    """Must not contain edits that change the conversation."""

    def check_stateless(self) -> None:
        """Raises `InvalidRequest` for fields with which Anthropic's server would store or edit the conversation."""
        if self.thread is not None:
            raise ThreadUnsupported
        for i, edit in enumerate((self.context_management and self.context_management.edits) or []):
            if edit.keep != "all":
                message = f"is of type {edit.type!r}, which is not supported; shorten the conversation on the client"
                raise InvalidRequest(f"context_management.edits[{i}]", message)

    def functions(self) -> dict[str, Json]:
        """{field: the tool as OpenAI's object}, for the tools that the model gets. Raises `InvalidRequest`.

        Deferred tools come last, in the order in which results refer to them: the start of the prompt stays the same.
        """
        given = {f"tools[{i}]": tool for i, tool in enumerate(self.tools or []) if tool.type in _CUSTOM}
        functions = {field: _function(field, tool) for field, tool in given.items()}
        deferred = {tool.name: field for field, tool in given.items() if tool.defer_loading}
        found = [deferred[name] for name in self._referenced_tools() if name in deferred]
        fields = [field for field, tool in given.items() if not tool.defer_loading]
        return {field: functions[field] for field in (*fields, *found)}

    def left_out(self) -> tuple[str, ...]:
        """The fields of the tools that are not used, whatever the conversation."""
        return tuple(f"tools[{i}]" for i, tool in enumerate(self.tools or []) if tool.type not in _CUSTOM)

    def _referenced_tools(self) -> Iterator[str]:
        for message in self.messages:
            for block in message.content if isinstance(message.content, list) else []:
                for part in block.content if isinstance(block.content, list) else []:
                    if part.type == "tool_reference" and part.tool_name:
                        yield part.tool_name

    def choice(self) -> ToolChoice:
        """`tool_choice`. Raises `InvalidRequest`."""
        wanted = self.tool_choice or MessagesToolChoice(type="auto")
        if wanted.type == "tool" and wanted.name is None:
            raise InvalidRequest("tool_choice.name", "is required for type tool")
        name = wanted.name if wanted.type == "tool" else None
        for tool in self.tools or []:
            if name and tool.name == name and tool.type not in _CUSTOM:
                message = (
                    f"demands {tool.type!r:.80}, which this server does not have; name a tool with an input_schema"
                )
                raise InvalidRequest("tool_choice", message)
        return ToolChoice(
            mode=_MODES[wanted.type], name=name, parallel=name is None and not wanted.disable_parallel_tool_use
        )

    def schema(self) -> Json | bool | None:
        """The JSON schema of the answer, None for free text. Raises `InvalidRequest`."""
        if self.response_format:
            raise InvalidRequest("response_format", "belongs to another API; use output_config.format")
        form = (self.output_config and self.output_config.format) or self.output_format
        return one_schema("output_config.format", form.schema if form else None, self)


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: int

    @property
    def usage_events(self) -> UsageEvents:
        """Which events have `usage`: a stream starts with the number of prompt tokens."""
        wanted = super().usage_events
        return "prefill" if self.stream and wanted == "end" else wanted


def _function(field: str, tool: MessagesTool) -> Json:
    if not tool.name:
        raise InvalidRequest(f"{field}.name", "is required")
    if tool.input_schema is None:
        raise InvalidRequest(f"{field}.input_schema", "is required")
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


# --- responses ------------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A block of text."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """A block of reasoning."""

    thinking: str
    signature: Literal[""] = ""
    """Always empty: this server does not sign reasoning."""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: Json
    """The arguments."""


ResponseBlock = TextBlock | ThinkingBlock | ToolUseBlock

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]


class ThinkingTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.output_tokens_details`."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. The prompt's tokens are the sum of the three input fields."""

    input_tokens: int
    """Prompt tokens that were computed."""
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    """Prompt tokens taken from the prefix cache."""
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails | UnsetType = UNSET
    """Absent in `message_start`."""


class MessagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/messages`, not streamed; and the empty message of `message_start`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    """The name of the loaded model."""
    content: list[ResponseBlock]
    stop_reason: StopReason | None
    """`pause_turn`: the request's timeout expired. None in `message_start`."""
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET
    """With `timings_per_token`."""


class CountTokensResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    input_tokens: int


# --- the events of a stream -----------------------------------------------------------------------------------------


class BlockTextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class BlockThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class BlockJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of a tool call's arguments (JSON text)."""

    partial_json: str


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    """The first event."""

    message: MessagesResponse


class ContentBlockStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block starts, empty."""

    index: int
    content_block: ResponseBlock


class ContentBlockDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: BlockTextDelta | BlockThinkingDelta | BlockJsonDelta
    timings: Timings | UnsetType = UNSET
    """With `timings_per_token`."""


class ContentBlockStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class MessageEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    """The message has ended."""

    delta: MessageEnd
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET
    """With `timings_per_token`."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="ping"):
    """Sent after silence, and with `return_progress`. Clients ignore this event type."""

    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    """With `timings_per_token`."""


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


StreamEvent = (
    MessageStart | Ping | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
)
