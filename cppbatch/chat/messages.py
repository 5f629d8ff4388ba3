"""Messages and tools of a conversation as clients send them: OpenAI's objects, ready for templates."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cppbatch.chat.escaped_lark import INPUT
from cppbatch.chat.media_parts import READABLE, MediaFields
from cppbatch.chat.tools import ToolChoice, allowed_choice, tool_choice_of
from cppbatch.errors import InvalidRequest

Json = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(MediaFields, kw_only=True):
    """A part of a message: text, an image or audio."""

    type: str
    """`text`, `refusal`, or a type of `MediaFields`."""
    text: str | None = None
    refusal: str | None = None

    def as_dict(self, field: str) -> Json:
        """The part in the form for `ChatFormat`. `field`: its name in errors. Raises `InvalidRequest`."""
        if source := self.source(self.type, field):
            return source.part()
        if self.type not in ("text", "refusal") or (self.text is None and self.refusal is None):
            raise InvalidRequest(field, f"is of type {self.type!r:.80}; supported types are {READABLE}")
        return {"type": "text", "text": self.text or self.refusal or ""}


class RequestFunctionCall(msgspec.Struct):
    """The function of a tool call."""

    name: str
    arguments: str | Json = "{}"
    """A JSON object, or a string that contains one."""


class RequestCustomCall(msgspec.Struct):
    """The custom tool of a tool call."""

    name: str
    input: str


class RequestToolCall(msgspec.Struct):
    """A tool call made by the assistant."""

    function: RequestFunctionCall | None = None
    custom: RequestCustomCall | None = None
    """For a custom tool."""
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
    """The call in OpenAI's format before tools (until 2023)."""
    tool_call_id: str | None = None
    refusal: str | None = None

    def as_dict(self, field: str) -> Json:
        """The message as chat templates expect it. `field`: its name in errors. Raises `InvalidRequest`."""
        if self.role not in _ROLES:
            raise InvalidRequest(f"{field}.role", f"is {self.role!r}; it must be one of {', '.join(_ROLES)}")
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{field}.content", "is required")
        message: Json = {"role": self.role, "content": self._content(f"{field}.content")}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.as_dict(f"{field}.tool_calls[{i}]") for i, call in calls]
        return message

    def _content(self, field: str) -> str | list[Json] | None:
        if isinstance(self.content, list):
            return [part.as_dict(f"{field}[{i}]") for i, part in enumerate(self.content)]
        return self.refusal if self.content is None else self.content


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the assistant may call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    """The JSON schema of the arguments."""
    strict: bool | None = None


class CustomGrammar(msgspec.Struct):
    """The grammar of a custom tool's text."""

    syntax: str
    """`lark` or `regex`."""
    definition: str


class CustomFormat(msgspec.Struct, omit_defaults=True):
    """The format of a custom tool's text."""

    type: str
    """`text` or `grammar`."""
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
    """`auto` or `required`."""


class ToolChoiceObject(NamedTool):
    """`tool_choice`: the tool to call, or the allowed tools (type `allowed_tools`)."""

    allowed_tools: AllowedTools | None = None


_RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")


def conversation_of(messages: list[ChatMessage]) -> list[Json]:
    """The messages as chat templates expect them. Raises `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("messages", "is empty; give at least one message")
    rendered = [message.as_dict(f"messages[{i}]") for i, message in enumerate(messages)]
    call_id = ""
    for i, message in enumerate(messages):  # OpenAI's form until 2023
        if message.function_call:
            call_id = f"call{i:05}"  # nine letters and digits, as some templates require
            call = {"function": msgspec.to_builtins(message.function_call), "id": call_id, "type": "function"}
            rendered[i]["tool_calls"] = [call]
        elif message.role == "function":
            rendered[i] |= {"role": "tool", "tool_call_id": call_id}
    return rendered


def choice_of(wanted: str | ToolChoiceObject, *, parallel: bool) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls`. Raises `InvalidRequest`."""
    if isinstance(wanted, str):
        return tool_choice_of(wanted, parallel=parallel)
    if wanted.type != "allowed_tools":
        return ToolChoice(mode="required", name=wanted.tool_name("tool_choice"), parallel=False)
    if wanted.allowed_tools is None:
        raise InvalidRequest("tool_choice.allowed_tools", "is required")
    field, allowed = "tool_choice.allowed_tools", wanted.allowed_tools
    names = [tool.tool_name(f"{field}.tools[{i}]") for i, tool in enumerate(allowed.tools)]
    return allowed_choice(f"{field}.mode", allowed.mode, names, parallel=parallel)


def check_variables(variables: Json) -> Json:
    """`chat_template_kwargs` with the reasoning effort. Raises `InvalidRequest` for a variable that has its own
    field."""
    if reserved := [name for name in _RESERVED_VARIABLES if name in variables]:
        raise InvalidRequest(f"chat_template_kwargs.{reserved[0]}", "is set by its own field in the request")
    return variables
