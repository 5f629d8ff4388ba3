"""How one model holds a conversation: its prompt, and how its text is read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cppbatch.chat.families import Family, family_of
from cppbatch.chat.generic import without_tools
from cppbatch.chat.grammar import constraint
from cppbatch.chat.parser import MessageParser, Reader
from cppbatch.chat.reasoning import Thinking, is_thinking
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice, callable_tools
from cppbatch.errors import InvalidRequest

Json = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """The assistant's next message: what to generate, and how to read it."""

    prompt: str
    parser: Callable[[], Reader]
    """Makes a reader for one completion."""
    params: Json = field(default_factory=dict)
    """What `SamplingParams` must have for it: perhaps a grammar, and the control tokens that must be seen."""
    prefilled: bool = False
    """The text goes on with the last message."""


class ChatFormat:
    """A model's template, and the tool calls and thoughts that it was trained to write.

    `token_ids`: of those of the family's markers that are one token. Raises `InvalidRequest` when the template is broken.
    """

    def __init__(self, template: ChatTemplate, token_ids: dict[str, int] | None = None) -> None:
        self.template = template
        self.family = family_of(template)
        self._thinking = Thinking.of(template.source)
        self._token_ids = token_ids or {}

    def prompt(self, messages: list[Json], tools: list[Json], variables: Json, *, goes_on: bool) -> str:
        """The conversation as text; with `goes_on` it ends within the last message. Raises `InvalidRequest`."""
        if not self.template.takes_tools:
            messages, tools = without_tools(messages, tools), []
        return self.template.render(messages, tools=tools or None, continue_final_message=goes_on, **variables)

    def turn(
        self,
        messages: list[Json],
        *,
        tools: list[Json],
        choice: ToolChoice,
        schema: Json | bool | None = None,
        variables: Json | None = None,
        goes_on: bool | None = None,
    ) -> Turn:
        """The next message of this conversation (OpenAI's message and tool objects).

        `schema`: its text must be JSON of it. `goes_on`: it continues the last message; None: if that is the assistant's.
        Raises `InvalidRequest`.
        """
        callable_ = callable_tools(tools, choice)
        last = messages[-1]
        if goes_on is None:
            goes_on = last["role"] == "assistant" and not last.get("tool_calls")
        prompt = self.prompt(messages, callable_, variables or {}, goes_on=goes_on)
        thinking = self._thinking if self._thinking and is_thinking(prompt, self._thinking) else None
        names = [tool["function"]["name"] for tool in callable_]
        params: Json = {}
        if choice.mode == "required" or schema is not None:
            if choice.mode == "required" and schema is not None:
                raise InvalidRequest("response_format", "cannot be used together with a tool_choice that requires a call")
            ...
        return Turn(prompt=prompt, parser=lambda: MessageParser(self.family, names), params=params, prefilled=goes_on)
