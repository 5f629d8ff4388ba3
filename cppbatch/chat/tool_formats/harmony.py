"""gpt-oss: a message is a sequence of channels, one of them for thoughts, one for the answer, one for calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from cppbatch.chat.deltas import Delta, ReasoningDelta, TextDelta
from cppbatch.chat.output_parser import OutputParser
from cppbatch.chat.reasoning import ReasoningState, ReasoningTags
from cppbatch.chat.scanning import MarkerFinder
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat
from cppbatch.chat.tool_parser import ToolCallEmitter, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.lark_grammar import LarkGrammar

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ASSISTANT = f"{_START}assistant"
_LONGEST_HEADER = 256
_RECIPIENT = re.compile(r"\bto=(functions\.)?([^\s<]+)")
_NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyFormat(ToolCallFormat):
    """Each part has a header, `<|channel|>analysis`, and its text between `<|message|>` and `<|end|>`.

    A call is a part with a recipient, `to=functions.name`, before or behind the channel. It ends the message.
    """

    name = "harmony"
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    parses_reasoning = True
    parallel_calls = False

    def reader(
        self, prompt: str, tools: ToolSchemas, thinking: ReasoningTags | None, thought: ReasoningState
    ) -> OutputParser:
        """Knows what there is of the message in the prompt."""
        reader = _HarmonyParser(self, tools)
        _, begun, there = prompt.rpartition(_ASSISTANT)
        reader.push(there if begun else "")
        return reader

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """As `ToolCallFormat.calls_grammar`."""
        calls = []
        for name, schema in tools.items():
            before = lark.text(f" to=functions.{name}{_CHANNEL}commentary json{_MESSAGE}")
            behind = lark.text(f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}")
            calls.append(f"({behind} | {before}) {lark.json(schema)}")
        return f"{self._reasoning_grammar(lark)} {lark.one_of(calls)}"

    def answer_grammar(self, lark: LarkGrammar, answer: str) -> str:
        """As `ToolCallFormat.answer_grammar`."""
        return f"{self._reasoning_grammar(lark)} {lark.text(f'{_CHANNEL}final{_MESSAGE}')} {answer}"

    def _reasoning_grammar(self, lark: LarkGrammar) -> str:
        before, after = lark.text(f"{_CHANNEL}analysis{_MESSAGE}"), lark.text(_ASSISTANT)
        return f"({before} {lark.up_to('<|end|>')} {after})?"


class _HarmonyParser:
    """Reads headers and what follows them. Text without a header is the answer.

    A part has ended when the next begins or the message ends: a marker alone may be a word in a text.
    """

    def __init__(self, family: ToolCallFormat, tools: ToolSchemas) -> None:
        self._out: list[Delta] = []
        self._calls = ToolCallEmitter(tools, family.new_call_id, self._out)
        self._unread = ""
        self._header = MarkerFinder([_MESSAGE])
        self._body = MarkerFinder(end + _START for end in _ENDS)
        self._tell: Callable[[str], None] = self._answer
        self._separator: dict[type, str] = {}  # between parts of the same kind
        self._n_told = 0
        self._is_call = False
        self._step: Callable[[], bool] = self._first

    def push(self, text: str) -> list[Delta]:
        """As `OutputParser.push`."""
        self._unread += text
        while self._unread and self._step():
            pass
        told, self._out[:] = list(self._out), []
        return told

    def close(self) -> list[Delta]:
        """As `OutputParser.close`."""
        left, self._unread = self._unread, ""
        if self._step != self._in_header:
            self._tell(next((left.removesuffix(end) for end in _ENDS if left.endswith(end)), left))
        self._end_body()
        told, self._out[:] = list(self._out), []
        return told

    def _first(self) -> bool:
        """At the very beginning, where a model that knows no channels may begin to speak."""
        text = self._unread.lstrip()
        begins = [part for part in (_CHANNEL, _MESSAGE, "to=") if part.startswith(text[: len(part)])]
        if not begins:
            self._step = self._in_body
        elif text.startswith(tuple(begins)):
            self._step = self._in_header
        return not begins or text.startswith(tuple(begins))

    def _in_header(self) -> bool:
        header, marker, rest = self._header.split(self._unread)
        if len(header) > _LONGEST_HEADER:
            self._step, self._tell = self._in_body, self._answer
            return True
        if marker is None:
            return False
        self._unread, self._step, self._n_told = rest, self._in_body, 0
        channel, recipient = _NAME_OF_CHANNEL.search(header), _RECIPIENT.search(header)
        tools = self._calls.tools
        if recipient and tools and (recipient[1] or recipient[2] in tools):
            self._calls.start(recipient[2])
            self._tell, self._is_call = self._argue, True
        else:
            self._tell = self._think if channel and channel[1] == "analysis" else self._answer
        return True

    def _in_body(self) -> bool:
        text, marker, self._unread = self._body.split(self._unread)
        if text:
            self._tell(text)
        if marker is not None:
            self._end_body()
            self._step = self._in_header
        return marker is not None

    def _end_body(self) -> None:
        if self._is_call and not self._n_told:
            self._calls.arguments("{}")
        self._is_call, self._tell = False, self._answer
        self._separator = dict.fromkeys(self._separator, "\n\n")

    def _argue(self, text: str) -> None:
        self._n_told += len(text)
        self._calls.arguments(text)

    def _think(self, text: str) -> None:
        self._out.append(ReasoningDelta(self._separator.get(ReasoningDelta, "") + text))
        self._separator[ReasoningDelta] = ""

    def _answer(self, text: str) -> None:
        if text:
            self._out.append(TextDelta(self._separator.get(TextDelta, "") + text))
            self._separator[TextDelta] = ""
