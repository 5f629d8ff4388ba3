"""The bodies of OpenAI's completion and chat requests. Unknown fields are ignored, as OpenAI does."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from cppbatch.chat.tools import TOOL_CHOICE_MODES, ToolChoice
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.server.assistant_output import effort_variables
from cppbatch.server.sampling_fields import SamplingFields

Json = dict[str, Any]


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens to show with their log-probabilities, beside the one taken; to 20."""
    suffix: str | None = None
    """What comes after the text, for models that were trained to fill in."""
    user: str | None = None
    """Not used here."""

    def prompts(self) -> list[str | list[int]]:
        """The prompts: one text, one list of token ids, or several of either. Raises `InvalidRequest`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(item, int) for item in self.prompt):
            return [[item for item in self.prompt if isinstance(item, int)]]
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        if not prompts or len(prompts) < len(self.prompt):
            raise InvalidRequest("prompt", "must be a string, token ids, or a list of those, and not empty")
        return prompts


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(msgspec.Struct):
    """A part of a message; only text is read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    """The function of a call; `arguments` is JSON as text."""

    name: str
    arguments: str | Json = "{}"


class ToolCall(msgspec.Struct):
    """A call that the assistant has made."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """What the assistant thought before it answered."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    def as_dict(self, field: str) -> Json:
        """The message as chat templates want it. Raises `InvalidRequest` for an unknown role, images and the like."""
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
    """What a tool does, and which arguments it takes."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A function that the assistant may call."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct):
    """`tool_choice`: this function must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    _ALIASES: ClassVar[dict[str, str]] = {
        **SamplingFields._ALIASES,
        "max_tokens": "max_completion_tokens",  # OpenAI's newer name
        "logprobs": "top_logprobs",
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    wants_logprobs: bool | None = msgspec.field(default=None, name="logprobs")
    top_logprobs: int | None = None
    """How many of the likeliest tokens to show, to 20; `logprobs` must be true."""
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    """none, auto (the default), required, or one function by name."""
    old_functions: list[Any] | None = msgspec.field(default=None, name="functions")
    """The form that tools had until 2023. Must be empty."""
    parallel_tool_calls: bool | None = None
    """False: at most one call a message."""
    reasoning_effort: str | None = None
    """For the chat template: none, minimal, low, medium, high, or what the model knows."""
    chat_template_kwargs: Json | None = None
    """Further variables for the chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends with the last message. True: the assistant begins a new message, even after its own."""
    user: str | None = None
    """Not used here."""

    @property
    def names_length(self) -> bool:
        """As in `SamplingFields`."""
        return super().names_length or self.max_completion_tokens is not None

    def params(self, **defaults: Any) -> SamplingParams:
        """As in `SamplingFields`."""
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InvalidRequest("top_logprobs", "is only of use when logprobs is true")
        wanted = {"logprobs": 0} if self.wants_logprobs else {}
        return super().params(**defaults, **wanted)

    def conversation(self) -> list[Json]:
        """The messages as chat templates want them. Raises `InvalidRequest`."""
        if not self.messages:
            raise InvalidRequest("messages", "is empty; give at least one message")
        return [message.as_dict(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def functions(self) -> list[Json]:
        """The tools as chat templates want them. Raises `InvalidRequest`."""
        if self.old_functions:
            raise InvalidRequest("functions", "is not served any more; give `tools`, each with one function")
        return [msgspec.to_builtins(tool) for tool in self.tools or []]

    def choice(self) -> ToolChoice:
        """Which tools may be, or must be, called. Raises `InvalidRequest`."""
        wanted = self.tool_choice or "auto"
        if isinstance(wanted, NamedTool):
            return ToolChoice(mode="required", name=wanted.function.name, parallel=False)
        for mode in TOOL_CHOICE_MODES:
            if wanted == mode:
                return ToolChoice(mode=mode, parallel=self.parallel_tool_calls is not False)
        raise InvalidRequest(
            "tool_choice", f"is {wanted!r}; it must be {', '.join(TOOL_CHOICE_MODES)} or a function by its name"
        )

    def template_variables(self) -> Json:
        """What the chat template gets beside messages and tools. Raises `InvalidRequest`."""
        variables = effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})
        if taken := [name for name in _OWN_VARIABLES if name in variables]:
            raise InvalidRequest(f"chat_template_kwargs.{taken[0]}", "has a field of its own in the request")
        return variables
