"""Parses a completion's text, as it is streamed, into deltas of reasoning, text and tool calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from cppbatch.chat.reasoning import ReasoningState, ReasoningTags
from cppbatch.chat.scanning import MarkerFinder

ToolSchemas = dict[str, Any]
"""Function names to the JSON schemas of their parameters."""


class OutputParser(Protocol):
    """Parses one completion. The resulting message does not depend on how the text is split into pushes."""

    def push(self, text: str) -> list[Delta]:
        """Reads more text. Returns the final deltas so far."""
        ...

    def close(self) -> list[Delta]:
        """Ends the completion. Returns the held-back deltas."""
        ...


class MalformedToolCall(Exception):
    """The text is not a tool call, or not from here on. `rest`: the part of it that was not emitted."""

    def __init__(self, rest: str) -> None:
        super().__init__(rest)
        self.rest = rest


class ToolParser(Protocol):
    """Parses one block of tool calls and passes them to a `ToolCallEmitter`.

    The calls do not depend on how the text is split into pushes.
    """

    def push(self, text: str) -> str | None:
        """Returns the text after the block once the block has ended, else None. Raises `MalformedToolCall`."""
        ...

    def close(self) -> None:
        """Ends the message. Raises `MalformedToolCall`."""
        ...


class ToolCallEmitter:
    """Turns the calls of one message into deltas as they are parsed, and appends these to `deltas`."""

    def __init__(self, tools: ToolSchemas, new_call_id: Callable[[], str], deltas: list[Delta]) -> None:
        self.tools = tools
        self.count = 0
        self._new_call_id = new_call_id
        self._deltas = deltas

    def start(self, name: str, call_id: str | None = None) -> None:
        """Starts a call. `call_id`: the id that the model wrote; None: a new one."""
        name = name.encode("utf-8", "replace").decode()  # a name in JSON may have half of a surrogate pair
        self._deltas.append(ToolCallStart(self.count, call_id or self._new_call_id(), name))
        self.count += 1

    def arguments(self, text: str) -> None:
        """Appends to the arguments of the last call."""
        if text:
            self._deltas.append(ArgumentsDelta(self.count - 1, text))


class TaggedOutputParser:
    """Parses messages with reasoning between tags, tool calls after markers, and text elsewhere.

    Reasoning comes first. A tool call starts with one of `start_markers` anywhere in the text, or with one of
    `start_prefixes` at the start of the message. `make_tool_parser` gets that string and creates the parser of the
    following text; the parser reads a prefix itself, but not a marker. Whitespace next to tags and calls is dropped. An
    invalid call is emitted as text, as the model wrote it. Without `tools` there are no calls. `dropped`: marks around
    the text, which are not part of it.
    """

    def __init__(
        self,
        tools: ToolSchemas,
        *,
        start_markers: tuple[str, ...],
        start_prefixes: tuple[str, ...],
        make_tool_parser: Callable[[str, ToolCallEmitter], ToolParser],
        new_call_id: Callable[[], str],
        tags: ReasoningTags | None,
        state: ReasoningState,
        dropped: tuple[str, ...] = (),
    ) -> None:
        start_markers = start_markers if tools else ()
        self._start_prefixes = start_prefixes if tools else ()
        self._make_tool_parser = make_tool_parser
        self._deltas: list[Delta] = []
        self._calls = ToolCallEmitter(tools, new_call_id, self._deltas)
        self._start_tag = tags.start if tags else None
        self._end_tag = MarkerFinder([tags.end] if tags else ())
        marks = [*start_markers, *dropped]
        self._start_markers = MarkerFinder(marks)
        empty_thought = [tags.end] if tags and state is ReasoningState.POSSIBLE else []
        self._dropped = frozenset({*dropped, *empty_thought})
        starts = [*self._start_prefixes, *([tags.start] if tags else ()), *empty_thought, *marks]
        self._message_starts = MarkerFinder(starts)
        self._later_starts = MarkerFinder([*([tags.start] if tags else ()), *marks])  # a thought between calls
        self._unread = ""
        self._space = ""  # white space that is emitted only if text follows
        self._is_empty = True  # no text and no call yet
        self._tool_parser: ToolParser | None = None
        self._marker = ""  # that started the call
        self._call_text = ""  # of the current call, until part of it has been emitted
        self._n_calls_before = 0  # calls that had been emitted when the current one started
        inside = state in (ReasoningState.STARTED, ReasoningState.INSIDE)
        self._reasoning_starts = state is ReasoningState.STARTED
        self._step: Callable[[], bool] = self._in_reasoning if inside else self._at_start

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that no later text can change; tags end or start a part."""
        self._unread += text
        self._parse()
        return self._take_deltas()

    def close(self) -> list[Delta]:
        """Ends open calls and returns the remaining deltas."""
        while self._tool_parser is not None:
            with contextlib.suppress(MalformedToolCall):
                self._tool_parser.close()
            if self._calls.count > self._n_calls_before:
                return self._take_deltas()
            self._read_as_text()
            self._parse()
        if self._step == self._in_reasoning:
            self._emit_reasoning(self._unread)
        else:
            self._emit_text(self._unread)
            if self._space:
                self._deltas.append(TextDelta(self._space))
        return self._take_deltas()

    def _parse(self) -> None:
        while self._unread and self._step():
            pass

    def _take_deltas(self) -> list[Delta]:
        taken, self._deltas[:] = list(self._deltas), []
        return taken

    def _at_start(self) -> bool:
        """Before the message, after the reasoning, or after a call."""
        starts = self._message_starts if self._is_empty else self._later_starts
        if self._is_empty and not starts:
            self._step = self._in_text
            return True
        text = self._unread.lstrip()
        if self._is_empty:
            self._space += self._unread[: len(self._unread) - len(text)]
        self._unread = text
        if not text:
            return False
        marker = starts.at_start(text)
        if marker == "":
            return False
        if marker is None:
            self._step = self._in_text
        else:
            self._read_marker(marker, text)
        return True

    def _read_marker(self, marker: str, text: str) -> None:
        """`text` begins with it."""
        rest = text[len(marker) :]
        if marker == self._start_tag:
            self._unread, self._space = rest, ""
            self._reasoning_starts, self._step = True, self._in_reasoning
        elif marker in self._dropped:
            self._unread = rest
        elif marker in self._start_prefixes:
            self._start_call(marker, text, "")
        else:
            self._start_call(marker, rest, marker)

    def _in_text(self) -> bool:
        before, marker, self._unread = self._start_markers.split(self._unread)
        self._emit_text(before)
        if marker is not None and marker not in self._dropped:
            self._start_call(marker, self._unread, marker)
        return marker is not None

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        if self._start_markers:  # white space before a call is not part of the text
            text = self._space + text
            emitted = text.rstrip()
            self._space = text[len(emitted) :]
        else:
            emitted, self._space = self._space + text, ""
        if emitted:
            self._is_empty = False
            self._deltas.append(TextDelta(emitted))

    def _in_reasoning(self) -> bool:
        before, marker, self._unread = self._end_tag.split(self._unread)
        self._emit_reasoning(before)
        if marker is not None:
            self._space, self._step = "", self._after_reasoning
        return marker is not None

    def _after_reasoning(self) -> bool:
        self._unread = self._unread.lstrip()
        if self._unread:
            self._step = self._at_start
        return bool(self._unread)

    def _emit_reasoning(self, text: str) -> None:
        text = self._space + text
        if self._reasoning_starts:
            text = text.lstrip()
        emitted = text.rstrip()
        if emitted:
            self._reasoning_starts, self._space = False, text[len(emitted) :]
            self._deltas.append(ReasoningDelta(emitted))
        elif not self._reasoning_starts:
            self._space = text

    def _start_call(self, marker: str, rest: str, consumed: str) -> None:
        self._tool_parser = self._make_tool_parser(marker, self._calls)
        self._marker, self._call_text, self._unread = consumed, "", rest
        self._n_calls_before = self._calls.count
        self._step = self._in_call

    def _in_call(self) -> bool:
        assert self._tool_parser
        text, self._unread = self._unread, ""
        if self._calls.count == self._n_calls_before:
            self._call_text += text
        try:
            rest = self._tool_parser.push(text)
        except MalformedToolCall as error:
            if self._calls.count == self._n_calls_before:
                self._read_as_text()
                return True
            rest = error.rest
        if self._calls.count > self._n_calls_before:
            self._is_empty, self._space, self._call_text = False, "", ""
        elif rest is not None:  # a block without calls
            self._read_as_text()
            return True
        if rest is not None:
            self._tool_parser, self._unread, self._step = None, rest, self._at_start
        return rest is not None

    def _read_as_text(self) -> None:
        """Handles an invalid call: its marker or first character becomes text, and the rest is parsed again."""
        text, n = self._call_text, 0 if self._marker else 1
        self._emit_text(self._marker + text[:n])
        self._tool_parser, self._unread, self._step = None, text[n:], self._in_text


class PlainTextParser:
    """Reads nothing out of the text: all of it is content."""

    def push(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def close(self) -> list[Delta]:
        return []


class TextDelta(msgspec.Struct, frozen=True):
    """More text of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More reasoning, which the model writes before the answer."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool call starts. `index`: 0 for the first call of the message."""

    index: int
    id: str
    name: str
    is_custom: bool = False
    """Whether a custom tool is called, whose arguments are a text."""


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """More of a tool call's arguments, which are JSON text, or of a custom tool's text."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class ToolCall(msgspec.Struct):
    """A complete tool call."""

    id: str
    name: str
    arguments: str = ""
    """A JSON object as text; of a custom tool its text."""
    is_custom: bool = False


class AssistantMessage(msgspec.Struct):
    """A complete message, merged from deltas."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = msgspec.field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Appends deltas."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self.text += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            elif isinstance(delta, ToolCallStart):
                self.calls.append(ToolCall(delta.id, delta.name, is_custom=delta.is_custom))
            else:
                self.calls[delta.index].arguments += delta.text


def openai_message(text: str, reasoning: str, calls: list[ToolCall]) -> dict[str, Any]:
    """The assistant's message as OpenAI's object, which templates render when it is sent back."""
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_openai_call(call) for call in calls]
    return message


def _openai_call(call: ToolCall) -> dict[str, Any]:
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
