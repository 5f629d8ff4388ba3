"""gpt-oss: a message in channels, for reasoning (analysis), tool calls (commentary) and the answer (final)."""

from __future__ import annotations

import re
from collections.abc import Callable

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import Delta, OutputParser, ReasoningDelta, TextDelta, ToolCallEmitter, ToolSchemas
from cppbatch.chat.reasoning import ReasoningState, ReasoningTags, ThinkingBudget
from cppbatch.chat.scanning import MarkerFinder
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ASSISTANT = f"{_START}assistant"
_RECIPIENT = re.compile(r"\bto=(functions\.)?([^\s<]+)")
_NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyFormat(ToolCallFormat):
    """Each part has a header, `<|channel|>analysis`, and its text between `<|message|>` and `<|end|>`.

    A call is a part with a recipient, `to=functions.name`, before or after the channel. It ends the message.
    """

    name = "harmony"
    example = '<|channel|>commentary to=functions.NAME<|message|>{"KEY": "VALUE"}<|call|>'
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    parses_reasoning = True
    parallel_calls = False

    def output_parser(
        self,
        prompt: str,
        tools: ToolSchemas,
        tags: ReasoningTags | None,
        state: ReasoningState,
        dropped: tuple[str, ...] = (),
    ) -> OutputParser:
        """Returns a parser that has read the part of the message in the prompt."""
        parser = _HarmonyParser(tools, self.new_call_id)
        _, found, prefill = prompt.rpartition(_ASSISTANT)
        parser.push(prefill if found else "")
        return parser

    def thinking_budget(self, n_tokens: int, prompt: str, *, has_tools: bool) -> ThinkingBudget | None:
        """Limits the analysis channel. With tools the model chooses the channel after the reasoning."""
        start, end = f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>"
        _, is_open, inside = prompt.rpartition(_ASSISTANT)[2].rpartition(start)
        return ThinkingBudget(
            n_tokens=n_tokens,
            start=start,
            end=end,
            closing=f"{end}{_ASSISTANT}" + ("" if has_tools else f"{_CHANNEL}final{_MESSAGE}"),
            is_open=bool(is_open) and end not in inside,
            several=True,
        )

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """Returns the grammar of calls on the commentary channel."""
        calls = []
        for name, schema in lark.each(tools):
            before = lark.literal(f" to=functions.{name}{_CHANNEL}commentary json{_MESSAGE}")
            after = lark.literal(f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}")
            calls.append(f"({after} | {before}) {lark.json(schema)}")
        return f"{self._reasoning_grammar(lark)} {lark.one_of(calls)}"

    def answer_grammar(self, lark: LarkGrammar, answer: str) -> str:
        """Returns the grammar of reasoning and an answer on the final channel."""
        return f"{self._reasoning_grammar(lark)} {lark.literal(f'{_CHANNEL}final{_MESSAGE}')} {answer}"

    def _reasoning_grammar(self, lark: LarkGrammar) -> str:
        before, after = lark.literal(f"{_CHANNEL}analysis{_MESSAGE}"), lark.literal(_ASSISTANT)
        return f"({before} {lark.text_until('<|end|>')} {after})?"


class _HarmonyParser:
    """Parses headers and bodies. Text without a header is the answer.

    A part ends where the next one begins or the message ends. An end marker alone may be a word in the text.
    """

    def __init__(self, tools: ToolSchemas, new_call_id: Callable[[], str]) -> None:
        self._deltas: list[Delta] = []
        self._calls = ToolCallEmitter(tools, new_call_id, self._deltas)
        self._unread = ""
        self._header = MarkerFinder([_MESSAGE])
        self._body = MarkerFinder(end + _START for end in _ENDS)
        self._emit: Callable[[str], None] = self._emit_text
        self._separator: dict[type, str] = {}  # before the next part of the same kind
        self._n_emitted = 0
        self._is_call = False
        self._step: Callable[[], bool] = self._first

    def push(self, text: str) -> list[Delta]:
        self._unread += text
        while self._unread and self._step():
            pass
        taken, self._deltas[:] = list(self._deltas), []
        return taken

    def close(self) -> list[Delta]:
        left, self._unread = self._unread, ""
        if self._step != self._in_header:
            self._emit(next((left.removesuffix(end) for end in _ENDS if left.endswith(end)), left))
        self._end_body()
        taken, self._deltas[:] = list(self._deltas), []
        return taken

    def _first(self) -> bool:
        """At the start of the message. A model without channels may start with text."""
        text = self._unread.lstrip()
        starts = [part for part in (_CHANNEL, _MESSAGE, "to=") if part.startswith(text[: len(part)])]
        if not starts:
            self._step = self._in_body
        elif text.startswith(tuple(starts)):
            self._step = self._in_header
        return not starts or text.startswith(tuple(starts))

    def _in_header(self) -> bool:
        header, marker, rest = self._header.split(self._unread)
        if len(header) > 256:
            self._step, self._emit = self._in_body, self._emit_text
            return True
        if marker is None:
            return False
        self._unread, self._step, self._n_emitted = rest, self._in_body, 0
        channel, recipient = _NAME_OF_CHANNEL.search(header), _RECIPIENT.search(header)
        tools = self._calls.tools
        if recipient and tools and (recipient[1] or recipient[2] in tools):
            self._calls.start(recipient[2])
            self._emit, self._is_call = self._emit_arguments, True
        else:
            self._emit = self._emit_reasoning if channel and channel[1] == "analysis" else self._emit_text
        return True

    def _in_body(self) -> bool:
        text, marker, self._unread = self._body.split(self._unread)
        if text:
            self._emit(text)
        if marker is not None:
            self._end_body()
            self._step = self._in_header
        return marker is not None

    def _end_body(self) -> None:
        if self._is_call and not self._n_emitted:
            self._calls.arguments("{}")
        self._is_call, self._emit = False, self._emit_text
        self._separator = dict.fromkeys(self._separator, "\n\n")

    def _emit_arguments(self, text: str) -> None:
        self._n_emitted += len(text)
        self._calls.arguments(text)

    def _emit_reasoning(self, text: str) -> None:
        self._deltas.append(ReasoningDelta(self._separator.get(ReasoningDelta, "") + text))
        self._separator[ReasoningDelta] = ""

    def _emit_text(self, text: str) -> None:
        if text:
            self._deltas.append(TextDelta(self._separator.get(TextDelta, "") + text))
            self._separator[TextDelta] = ""
