"""What there is to know about how models of one family call tools."""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING

from cppbatch.chat.output_parser import OutputParser, TaggedOutputParser
from cppbatch.chat.reasoning import ReasoningState, ReasoningTags
from cppbatch.chat.tool_parser import ToolCallEmitter, ToolParser, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.lark_grammar import LarkGrammar

_LETTERS = string.ascii_letters + string.digits
MAX_TOOL_CALLS = 8
"""In one message, where calls are required."""


class ToolCallFormat:
    """Models that call tools in the same way."""

    name: str
    markers: tuple[str, ...] = ()
    """Strings with a meaning in its calls, which may be control tokens: they must be seen."""
    start_markers: tuple[str, ...] = ()
    """With which calls begin, anywhere in the text."""
    start_prefixes: tuple[str, ...] = ()
    """With which calls may begin as the first letters of a message."""
    template_has_tools: bool = True
    """The template takes tools, past calls and their results."""
    parses_reasoning: bool = False
    """Its thoughts are part of its own syntax, not text between tags."""
    parallel_calls: bool = True
    """A message may have more than one."""

    def new_call_id(self) -> str:
        """An id for a call, as its template wants ids."""
        return "call_" + random_alphanumerics(24)

    def reader(
        self, prompt: str, tools: ToolSchemas, thinking: ReasoningTags | None, thought: ReasoningState
    ) -> OutputParser:
        """For one completion of this prompt."""
        return TaggedOutputParser(self, tools, thinking=thinking, thought=thought)

    def calls(self, opening: str, calls: ToolCallEmitter) -> ToolParser:
        """Reads what follows an opening; a lead is the first that it reads."""
        raise NotImplementedError

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """The expression of a grammar for one call of these tools, or for up to `MAX_TOOL_CALLS`."""
        raise NotImplementedError

    def answer_grammar(self, lark: LarkGrammar, answer: str) -> str:
        """The expression for an answer whose text matches the expression `answer`."""
        return answer


def random_alphanumerics(n: int) -> str:
    """Letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(n))
