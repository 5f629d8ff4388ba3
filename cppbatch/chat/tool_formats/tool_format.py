"""The interface of a tool-call format."""

from __future__ import annotations

import contextlib
import re
import secrets
import string
from typing import Any

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import OutputParser, TaggedOutputParser, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.reasoning import ReasoningState, ReasoningTags, ThinkingBudget
from cppbatch.chat.scanning import parse_json

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")
"""A function's name in formats where nothing else marks its end."""

_ALPHANUMERICS = string.ascii_letters + string.digits


class ToolCallFormat:
    """How a family of models writes tool calls."""

    name: str
    """For logs and `/props`."""
    markers: tuple[str, ...] = ()
    """Strings that delimit calls. They may be control tokens, which must then appear in the text."""
    start_markers: tuple[str, ...] = ()
    """Strings that start a call anywhere in the text."""
    start_prefixes: tuple[str, ...] = ()
    """Strings that start a call only at the beginning of a message."""
    example: str = ""
    """A call as the model writes it."""
    template_has_tools: bool = True
    """The template renders tools, earlier calls and their results."""
    writes_calls: bool = False
    """`write_calls` can stand in for a template that leaves out tools or calls."""
    parses_reasoning: bool = False
    """Reasoning is part of the format itself, not text between tags."""
    parallel_calls: bool = True
    """A message may contain several calls."""

    def new_call_id(self) -> str:
        """Returns an id for a call in the form that the template accepts."""
        return "call_" + random_alphanumerics(24)

    def output_parser(
        self,
        prompt: str,
        tools: ToolSchemas,
        tags: ReasoningTags | None,
        state: ReasoningState,
        dropped: tuple[str, ...] = (),
    ) -> OutputParser:
        """Returns a parser of one completion of this prompt. `dropped`: marks around the text that are left out."""
        return TaggedOutputParser(
            tools,
            start_markers=self.start_markers,
            start_prefixes=self.start_prefixes,
            make_tool_parser=self.tool_parser,
            new_call_id=self.new_call_id,
            tags=tags,
            state=state,
            dropped=dropped,
        )

    def write_calls(self, calls: list[dict[str, Any]]) -> str:
        """Returns calls as the model writes them, for templates that do not render them."""
        raise NotImplementedError

    def thinking_budget(self, n_tokens: int, prompt: str, *, has_tools: bool) -> ThinkingBudget | None:
        """Returns a limit of the reasoning, if that is part of the format itself. `has_tools`: calls are possible."""
        return None

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        """Returns a parser of the text after a start marker, or of the text from a start prefix on."""
        raise NotImplementedError

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """Returns the grammar expression of one call, or with `several` of `LarkGrammar.repeat` ones."""
        raise NotImplementedError

    def answer_grammar(self, lark: LarkGrammar, answer: str) -> str:
        """Returns the grammar expression of a message whose text matches the expression `answer`."""
        return answer

    def text_grammar(self, lark: LarkGrammar) -> str:
        """Returns the grammar expression of a message without calls."""
        return self.answer_grammar(lark, lark.text_without(self.start_markers, self.start_prefixes))


def call_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a message's call, which OpenAI's API has as JSON text; {} if that is not an object."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = parse_json(arguments)
    return arguments if isinstance(arguments, dict) else {}


def random_alphanumerics(n: int) -> str:
    """Returns `n` random letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(n))
