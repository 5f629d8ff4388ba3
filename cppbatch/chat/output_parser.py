"""From a completion's text to thoughts, answer and tool calls, while it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from cppbatch.chat.deltas import Delta, ReasoningDelta, TextDelta
from cppbatch.chat.reasoning import ReasoningState, ReasoningTags
from cppbatch.chat.scanning import MarkerFinder
from cppbatch.chat.tool_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas

if TYPE_CHECKING:
    from cppbatch.chat.tool_formats.tool_format import ToolCallFormat


class OutputParser(Protocol):
    """Reads one completion. The message is the same however its text is split."""

    def push(self, text: str) -> list[Delta]:
        """Takes text, and returns what is certain by now."""
        ...

    def close(self) -> list[Delta]:
        """What was held back, at the end of the completion."""
        ...


class TaggedOutputParser:
    """A message that has thoughts between tags, calls behind markers, and text elsewhere.

    Thoughts come first. A call may begin with one of the family's `start_markers` anywhere, or with one of its
    `start_prefixes` as the message's first letters. White space beside tags and calls belongs to neither side.
    A call that turns out to be none is text as it was written.
    """

    def __init__(
        self, family: ToolCallFormat, tools: ToolSchemas, *, thinking: ReasoningTags | None, thought: ReasoningState
    ) -> None:
        self._family = family
        self._out: list[Delta] = []
        self._calls = ToolCallEmitter(tools, family.new_call_id, self._out)
        self._closing = MarkerFinder([thinking.closing] if thinking else ())
        self._openings = MarkerFinder(family.start_markers if tools else ())
        start_prefixes = family.start_prefixes if tools else ()
        self._opening_tag = thinking.opening if thinking else None
        self._first = MarkerFinder(
            [*start_prefixes, *([thinking.opening] if thinking else ()), *(family.start_markers if tools else ())]
        )
        self._unread = ""
        self._space = ""  # white space that is text only if text follows
        self._nothing_yet = True  # neither text nor a call
        self._call: ToolParser | None = None
        self._marker = ""  # with which the call began
        self._written = ""  # the call's text, as long as nothing of it is told
        self._untouched = 0  # calls that had been told when it began
        inside = thought in (ReasoningState.OPEN, ReasoningState.BEGUN)
        self._thought_begins = thought is ReasoningState.OPEN
        self._step: Callable[[], bool] = self._in_thought if inside else self._at_start

    def push(self, text: str) -> list[Delta]:
        """As `OutputParser.push`."""
        self._unread += text
        return self._read()

    def close(self) -> list[Delta]:
        """As `OutputParser.close`."""
        while self._call is not None:
            with contextlib.suppress(MalformedToolCall):
                self._call.close()
            if self._calls.count > self._untouched:
                return self._told()
            self._no_call(self._written)
            self._read_on()
        if self._step == self._in_thought:
            self._think(self._unread)
        else:
            self._say(self._unread)
            if self._space:
                self._out.append(TextDelta(self._space))
        return self._told()

    def _read(self) -> list[Delta]:
        self._read_on()
        return self._told()

    def _read_on(self) -> None:
        while self._unread and self._step():
            pass

    def _told(self) -> list[Delta]:
        told, self._out[:] = list(self._out), []
        return told

    def _at_start(self) -> bool:
        """Before the message, after a thought, or after a call."""
        markers = self._first if self._nothing_yet else self._openings
        if self._nothing_yet and not markers:
            self._step = self._in_text
            return True
        text = self._unread.lstrip()
        if self._nothing_yet:
            self._space += self._unread[: len(self._unread) - len(text)]
        self._unread = text
        if not text:
            return False
        marker = markers.at_start(text)
        if marker == "":
            return False
        if marker is None:
            self._step = self._in_text
            return True
        if marker == self._opening_tag:
            self._unread, self._space = text[len(marker) :], ""
            self._thought_begins, self._step = True, self._in_thought
            return True
        is_lead = marker in self._family.start_prefixes
        self._begin_call(marker, text if is_lead else text[len(marker) :], "" if is_lead else marker)
        return True

    def _in_text(self) -> bool:
        before, marker, self._unread = self._openings.split(self._unread)
        self._say(before)
        if marker is not None:
            self._begin_call(marker, self._unread, marker)
        return marker is not None

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._openings:  # space before a call is none of the text
            text = self._space + text
            shown = text.rstrip()
            self._space = text[len(shown) :]
        else:
            shown, self._space = self._space + text, ""
        if shown:
            self._nothing_yet = False
            self._out.append(TextDelta(shown))

    def _in_thought(self) -> bool:
        before, marker, self._unread = self._closing.split(self._unread)
        self._think(before)
        if marker is not None:
            self._space, self._step = "", self._after_thought
        return marker is not None

    def _after_thought(self) -> bool:
        self._unread = self._unread.lstrip()
        if self._unread:
            self._step = self._at_start
        return bool(self._unread)

    def _think(self, text: str) -> None:
        text = self._space + text
        if self._thought_begins:
            text = text.lstrip()
        shown = text.rstrip()
        if shown:
            self._thought_begins, self._space = False, text[len(shown) :]
            self._out.append(ReasoningDelta(shown))
        elif not self._thought_begins:
            self._space = text

    def _begin_call(self, marker: str, rest: str, consumed: str) -> None:
        self._call = self._family.calls(marker, self._calls)
        self._marker, self._written, self._unread = consumed, "", rest
        self._untouched = self._calls.count
        self._step = self._in_call

    def _in_call(self) -> bool:
        assert self._call
        text, self._unread = self._unread, ""
        untold = self._calls.count == self._untouched
        if untold:
            self._written += text
        try:
            rest = self._call.push(text)
        except MalformedToolCall as error:
            if self._calls.count == self._untouched:
                self._no_call(self._written)
                return True
            rest = error.rest
        if self._calls.count > self._untouched:
            self._nothing_yet, self._space, self._written = False, "", ""
        elif rest is not None:  # a block without any calls
            self._no_call(self._written)
            return True
        if rest is not None:
            self._call, self._unread, self._step = None, rest, self._at_start
        return rest is not None

    def _no_call(self, written: str) -> None:
        """It was none: its first letters are text, and the others are read again."""
        n = 0 if self._marker else 1
        self._say(self._marker + written[:n])
        self._call, self._unread, self._step = None, written[n:], self._in_text
