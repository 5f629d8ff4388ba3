"""How one model holds a conversation: its prompt, and how its text is read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cppbatch.chat.families import family_of
from cppbatch.chat.generic import text_of, without_tools
from cppbatch.chat.grammar import Place, answer_params, arguments_schemas, calls_grammar
from cppbatch.chat.parser import Reader
from cppbatch.chat.reasoning import Thinking, Thought
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
    renames: dict[str, str] = field(default_factory=dict)
    """Where the client wrote what stands in `params`: for the fields of errors."""


class ChatFormat:
    """A model's template, and the tool calls and thoughts that it was trained to write.

    `token_ids`: of those of `markers` that are one token.
    """

    def __init__(self, template: ChatTemplate, token_ids: dict[str, int] | None = None) -> None:
        self.template = template
        self.family = family_of(template)
        self.token_ids = token_ids or {}
        self._thinking = None if self.family.reads_thoughts else Thinking.of(template.source)

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings with a meaning in this model's text: `token_ids` tells which of them are one token."""
        return (*self._tags, *self.family.markers)

    @property
    def _tags(self) -> tuple[str, ...]:
        return self._thinking.markers if self._thinking else ()

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

        `schema`: its text must be JSON of it, unless tools are called. `variables` go to the template. `goes_on`: it
        continues the last message; None: if that is the assistant's. Raises `InvalidRequest`.
        """
        callable_ = callable_tools(tools, choice)
        schemas = arguments_schemas(callable_)
        if choice.mode == "required" and schema is not None:
            raise InvalidRequest("response_format", "cannot be used together with a tool_choice that requires a call")
        last = messages[-1]
        if goes_on is None:
            goes_on = last["role"] == "assistant" and not last.get("tool_calls")
        prompt = self._prompt(messages, callable_, variables or {}, goes_on=goes_on)
        thought = Thought.at_the_end(prompt, self._thinking, text_of(last) if goes_on else None)
        params: Json = {}
        if seen := self.markers if callable_ or self.family.reads_thoughts else self._tags:
            params["visible_tokens"] = seen
        renames = {}
        place = Place(self.family, self.token_ids, self._thinking, thought)
        if choice.mode == "required":
            params["grammar"] = calls_grammar(schemas, place, several=choice.parallel)
            renames = {"grammar": "tools"}
        elif schema is not None:
            params |= answer_params(schema, schemas, place, several=choice.parallel)
            renames = dict.fromkeys(("grammar", "json_schema"), "response_format")
        return Turn(
            prompt=prompt,
            parser=lambda: self.family.reader(prompt, schemas, self._thinking, thought),
            params=params,
            renames=renames,
        )

    def _prompt(self, messages: list[Json], tools: list[Json], variables: Json, *, goes_on: bool) -> str:
        """The conversation as text; with `goes_on` it ends within the last message."""
        if not self.family.template_tells_tools:
            needs_words = bool(tools) and not self.template.takes.system
            messages, tools = without_tools(messages, tools, has_system=not needs_words), []
        return self.template.render(messages, tools=tools or None, continue_final_message=goes_on, **variables)
