"""How one model holds a conversation: its prompt, and how its text is read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cppbatch.chat.output_parser import OutputParser
from cppbatch.chat.reasoning import ReasoningState, ReasoningTags
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tool_formats.detect import detect_tool_format
from cppbatch.chat.tool_formats.generic import content_text, describe_tools_in_text
from cppbatch.chat.tool_grammar import Place, answer_params, argument_schemas, calls_grammar
from cppbatch.chat.tools import ToolChoice, callable_tools
from cppbatch.errors import InvalidRequest

Json = dict[str, Any]


@dataclass(frozen=True)
class PreparedChat:
    """The assistant's next message: what to generate, and how to read it."""

    prompt: str
    output_parser: Callable[[], OutputParser]
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
        self.tool_format = detect_tool_format(template)
        self.token_ids = token_ids or {}
        self._thinking = None if self.tool_format.parses_reasoning else ReasoningTags.of(template.source)

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings with a meaning in this model's text: `token_ids` tells which of them are one token."""
        return (*self._tags, *self.tool_format.markers)

    @property
    def _tags(self) -> tuple[str, ...]:
        return self._thinking.markers if self._thinking else ()

    def prepare(
        self,
        messages: list[Json],
        *,
        tools: list[Json],
        choice: ToolChoice,
        schema: Json | bool | None = None,
        variables: Json | None = None,
        continue_final_message: bool | None = None,
    ) -> PreparedChat:
        """The next message of this conversation (OpenAI's message and tool objects).

        `schema`: its text must be JSON of it, unless tools are called. `variables` go to the template.
        `continue_final_message`: None if and only if the last message is the assistant's. Raises `InvalidRequest`.
        """
        callable_ = callable_tools(tools, choice)
        schemas = argument_schemas(callable_)
        if choice.mode == "required" and schema is not None:
            raise InvalidRequest("response_format", "cannot be used together with a tool_choice that requires a call")
        last = messages[-1]
        if continue_final_message is None:
            continue_final_message = last["role"] == "assistant" and not last.get("tool_calls")
        prompt = self._prompt(messages, callable_, variables or {}, continue_final_message=continue_final_message)
        thought = ReasoningState.of_prompt(
            prompt, self._thinking, content_text(last) if continue_final_message else None
        )
        params: Json = {}
        if seen := self.markers if callable_ or self.tool_format.parses_reasoning else self._tags:
            params["visible_tokens"] = seen
        renames = {}
        place = Place(self.tool_format, self.token_ids, self._thinking, thought)
        if choice.mode == "required":
            params["grammar"] = calls_grammar(schemas, place, several=choice.parallel)
            renames = {"grammar": "tools"}
        elif schema is not None:
            params |= answer_params(schema, schemas, place, several=choice.parallel)
            renames = dict.fromkeys(("grammar", "json_schema"), "response_format")
        return PreparedChat(
            prompt=prompt,
            output_parser=lambda: self.tool_format.reader(prompt, schemas, self._thinking, thought),
            params=params,
            renames=renames,
        )

    def _prompt(self, messages: list[Json], tools: list[Json], variables: Json, *, continue_final_message: bool) -> str:
        """The conversation as text; with `continue_final_message` it ends within the last message."""
        if not self.tool_format.template_has_tools:
            needs_words = bool(tools) and not self.template.capabilities.system
            messages, tools = describe_tools_in_text(messages, tools, has_system=not needs_words), []
        return self.template.render(
            messages, tools=tools or None, continue_final_message=continue_final_message, **variables
        )
