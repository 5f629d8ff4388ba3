"""The body of OpenAI's `POST /v1/responses`. Unknown fields are ignored, as OpenAI does."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from cppbatch.chat.tools import TOOL_CHOICE_MODES, ToolChoice
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.server.assistant_output import effort_variables
from cppbatch.server.sampling_fields import SamplingFields, SingleAnswerFields

Json = dict[str, Any]


class InputPart(msgspec.Struct):
    """A part of an item; only text is read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A message, a call, what it gave, or thoughts; which fields it has depends on its type."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    """Of a message, or of thoughts."""
    summary: list[InputPart] | None = None
    """Of thoughts, where they are not there themselves."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """Of a call: an object as JSON."""
    output: str | list[InputPart] | None = None
    """What a call gave."""


class ResponseTool(msgspec.Struct, omit_defaults=True):
    """A function that the assistant may call."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: Json | None = None
    """A JSON schema."""
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct):
    """`tool_choice`: this function must be called."""

    type: str
    name: str = ""


class TextFormat(msgspec.Struct, omit_defaults=True):
    """`text.format`: what the answer looks like."""

    type: str = "text"
    """text, json_object or json_schema."""
    name: str | None = None
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None

    def wanted(self) -> Json | None:
        """The schema of the answer, None for free text. Raises `InvalidRequest`."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.type != "json_schema":
            raise InvalidRequest("text.format.type", f"is {self.type!r}; it must be text, json_object or json_schema")
        if self.schema is None:
            raise InvalidRequest("text.format.schema", "is required when the type is json_schema")
        return self.schema


class TextConfig(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None


class ReasoningConfig(msgspec.Struct):
    """`reasoning`."""

    effort: str | None = None
    """For the chat template: none, minimal, low, medium, high, or what the model knows."""


LOGPROBS = "message.output_text.logprobs"
"""What `include` must have for log-probabilities."""

_STORED = {
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "background": "wait for the answer, or stream it",
    "prompt": "send its text as instructions or input",
}
"""Fields that need something stored, and what to do without."""


class ResponsesRequest(SingleAnswerFields, kw_only=True):
    """`POST /v1/responses`."""

    _ALIASES: ClassVar[dict[str, str]] = {
        **SamplingFields._ALIASES,
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }

    input: str | list[InputItem]
    instructions: str | None = None
    """The system's message."""
    max_output_tokens: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    """none, auto (the default), required, or one function by name."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs`; the others are ignored."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to show, to 20."""
    metadata: dict[str, str] | None = None
    """Given back as it is."""
    user: str | None = None
    """Given back as it is."""
    store: bool | None = None
    """Nothing is stored, whatever it says."""
    truncation: str | None = None
    """Nothing is left out, whatever it says: a prompt that is too long is refused."""
    previous_response_id: str | None = None
    """Must be absent: nothing is stored."""
    conversation: str | Json | None = None
    """Must be absent: nothing is stored."""
    background: bool | None = None
    """Must not be true: nothing is stored."""
    prompt: Json | None = None
    """Must be absent: nothing is stored."""

    @property
    def names_length(self) -> bool:
        """As in `SamplingFields`."""
        return super().names_length or self.max_output_tokens is not None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are shown."""
        return LOGPROBS in (self.include or []) or self.top_logprobs is not None

    def check_stateless(self) -> None:
        """Raises `InvalidRequest` for what only a server can do that stores responses."""
        for field, instead in _STORED.items():
            if getattr(self, field):
                raise InvalidRequest(field, f"cannot be used: this server stores nothing; {instead}")

    def params(self, **defaults: Any) -> SamplingParams:
        """As in `SamplingFields`."""
        wanted = {"logprobs": 0} if self.wants_logprobs else {}
        return super().params(**defaults, **wanted)

    def functions(self) -> list[Json]:
        """The tools as chat templates want them. Raises `InvalidRequest` for those that OpenAI would run itself."""
        return [_function(f"tools[{i}]", tool) for i, tool in enumerate(self.tools or [])]

    def choice(self) -> ToolChoice:
        """Which tools may be, or must be, called. Raises `InvalidRequest`."""
        wanted = self.tool_choice or "auto"
        given = wanted
        if isinstance(wanted, ResponseToolChoice):
            if wanted.type == "function":
                return ToolChoice(mode="required", name=wanted.name, parallel=False)
            given = wanted.type
        for mode in TOOL_CHOICE_MODES:
            if wanted == mode:
                return ToolChoice(mode=mode, parallel=self.parallel_tool_calls is not False)
        raise InvalidRequest(
            "tool_choice", f"is {given!r}; it must be {', '.join(TOOL_CHOICE_MODES)} or a function by its name"
        )

    @property
    def format(self) -> TextFormat:
        """What the answer looks like."""
        return (self.text and self.text.format) or TextFormat()

    def schema(self) -> Json | bool | None:
        """As in `SamplingFields`, of `text.format`."""
        if self.response_format:
            raise InvalidRequest("response_format", "belongs to another API; here it is text.format")
        return self.format.wanted()

    def template_variables(self) -> Json:
        """What the chat template gets beside messages and tools."""
        return effort_variables(self.reasoning.effort if self.reasoning else None)


def _function(field: str, tool: ResponseTool) -> Json:
    if tool.type != "function":
        message = f"is {tool.type!r}; this server has no tools of its own: give functions of yours (type function)"
        raise InvalidRequest(f"{field}.type", message)
    if not tool.name:
        raise InvalidRequest(f"{field}.name", "is required")
    return {"type": "function", "function": {k: v for k, v in msgspec.to_builtins(tool).items() if k != "type"}}
