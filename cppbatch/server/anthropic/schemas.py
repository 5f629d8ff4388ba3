"""The bodies of Anthropic's requests. Unknown fields are ignored, and so are those of the service around the model."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from cppbatch.chat.tools import ToolChoice, ToolChoiceMode
from cppbatch.errors import InvalidRequest
from cppbatch.server.assistant_output import effort_variables
from cppbatch.server.sampling_fields import SamplingFields, SingleAnswerFields

Json = dict[str, Any]


class Block(msgspec.Struct):
    """A part of a message; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    """The arguments of a call."""
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    """What a tool has answered."""
    is_error: bool | None = None


class InputMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct):
    """A function that the assistant may call."""

    name: str
    type: str | None = None
    """Absent, or `custom`."""
    description: str | None = None
    input_schema: Json | None = None
    """A JSON schema of its arguments."""


class MessagesToolChoice(msgspec.Struct):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """With `tool`: this one."""
    disable_parallel_tool_use: bool | None = None
    """True: at most one call a message."""


class ThinkingConfig(msgspec.Struct):
    """Whether the model thinks before it answers; how long it does is the model's own affair."""

    type: str
    """disabled; anything else means that it does."""
    budget_tokens: int | None = None
    """Not used here."""


class OutputFormat(msgspec.Struct):
    """What the answer looks like."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct):
    """How the answer is to be."""

    effort: str | None = None
    """For the chat template: low, medium, high, or what the model knows."""
    format: OutputFormat | None = None


_MODES: dict[str, ToolChoiceMode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class CountTokensRequest(SingleAnswerFields, kw_only=True):
    """`POST /v1/messages/count_tokens`: all that makes the prompt. A body for `/v1/messages` can be sent as it is."""

    _ALIASES: ClassVar[dict[str, str]] = {**SamplingFields._ALIASES, "stop": "stop_sequences"}

    model: str
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    metadata: Json | None = None
    """Not used here."""

    @property
    def names_length(self) -> bool:
        """As in `SamplingFields`: `max_tokens` is only the most there may be, and may exceed the context."""
        return False

    def functions(self) -> list[Json]:
        """The tools as OpenAI's objects. Raises `InvalidRequest` for those that Anthropic would run itself."""
        return [_function(f"tools[{i}]", tool) for i, tool in enumerate(self.tools or [])]

    def choice(self) -> ToolChoice:
        """Which tools may be, or must be, called. Raises `InvalidRequest`."""
        wanted = self.tool_choice or MessagesToolChoice(type="auto")
        if wanted.type == "tool" and wanted.name is None:
            raise InvalidRequest("tool_choice.name", "is required when the type is tool")
        name = wanted.name if wanted.type == "tool" else None
        return ToolChoice(
            mode=_MODES[wanted.type], name=name, parallel=name is None and not wanted.disable_parallel_tool_use
        )

    def schema(self) -> Json | bool | None:
        """The schema of the answer, None for free text. Raises `InvalidRequest`."""
        if self.response_format:
            raise InvalidRequest("response_format", "belongs to another API; here it is output_config.format")
        form = (self.output_config and self.output_config.format) or self.output_format
        return form.schema if form else None

    def template_variables(self) -> Json:
        """What the chat template gets beside messages and tools."""
        variables = effort_variables(self.output_config.effort if self.output_config else None)
        return variables | ({"enable_thinking": self.thinking.type != "disabled"} if self.thinking else {})


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int


def _function(field: str, tool: MessagesTool) -> Json:
    if tool.type not in (None, "custom"):
        message = f"is {tool.type!r}; this server has no tools of its own: give functions, with an input_schema"
        raise InvalidRequest(f"{field}.type", message)
    if tool.input_schema is None:
        raise InvalidRequest(f"{field}.input_schema", "is required")
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
