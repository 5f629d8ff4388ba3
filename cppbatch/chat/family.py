"""What there is to know about how models of one family call tools."""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING

from cppbatch.chat.calls import CallReader, Calls, Tools
from cppbatch.chat.parser import MessageParser, Reader
from cppbatch.chat.reasoning import Thinking, Thought

if TYPE_CHECKING:
    from cppbatch.chat.lark import Lark

_LETTERS = string.ascii_letters + string.digits
MOST_CALLS = 8
"""In one message, where calls are required."""


class Family:
    """Models that call tools in the same way."""

    name: str
    markers: tuple[str, ...] = ()
    """Strings with a meaning in its calls, which may be control tokens: they must be seen."""
    openings: tuple[str, ...] = ()
    """With which calls begin, anywhere in the text."""
    leads: tuple[str, ...] = ()
    """With which calls may begin as the first letters of a message."""
    template_tells_tools: bool = True
    """The template takes tools, past calls and their results."""
    reads_thoughts: bool = False
    """Its thoughts are part of its own syntax, not text between tags."""
    several_calls: bool = True
    """A message may have more than one."""

    def new_id(self) -> str:
        """An id for a call, as its template wants ids."""
        return "call_" + random_letters(24)

    def reader(self, prompt: str, tools: Tools, thinking: Thinking | None, thought: Thought) -> Reader:
        """For one completion of this prompt."""
        return MessageParser(self, tools, thinking=thinking, thought=thought)

    def calls(self, opening: str, calls: Calls) -> CallReader:
        """Reads what follows an opening; a lead is the first that it reads."""
        raise NotImplementedError

    def write_calls(self, lark: Lark, tools: Tools, *, several: bool) -> str:
        """The expression of a grammar for one call of these tools, or for up to `MOST_CALLS`."""
        raise NotImplementedError

    def write_answer(self, lark: Lark, answer: str) -> str:
        """The expression for an answer whose text matches the expression `answer`."""
        return answer


def random_letters(n: int) -> str:
    """Letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(n))
