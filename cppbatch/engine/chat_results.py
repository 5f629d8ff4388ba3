"""The assistant's message, during generation and when complete."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

import msgspec

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.output_parser import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    openai_message,
)
from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.request import (
    Completion,
    GenerationEvent,
    completion,
)

Json = dict[str, Any]


class ChatCompletion(Completion, frozen=True, kw_only=True):
    """The answer to a conversation. `text` is the answer without reasoning and tool calls.

    A message that ends with `tool_calls` has the finish reason `stop`, like every message that the model itself ends.
    """

    reasoning: str = ""
    """The model's reasoning before its answer."""
    tool_calls: list[ToolCall] = []  # noqa: RUF012  # msgspec copies it

    @property
    def message(self) -> Json:
        """OpenAI's message object, to append to the conversation for the next request."""
        return openai_message(self.text, self.reasoning, self.tool_calls)


class ChatEvent(msgspec.Struct, frozen=True, kw_only=True):
    """More of an assistant's message."""

    text: str = ""
    """New text of the answer."""
    reasoning: str = ""
    """New text of the reasoning."""
    deltas: list[Delta] = []
    """All new parts in order, including tool calls."""
    tokens: list[int] = []
    """New token ids."""
    completion: ChatCompletion | None = None
    """The whole answer; only set in the last event."""


def chat_completion(events: Sequence[GenerationEvent], chat: PreparedChat) -> ChatCompletion:
    """All events of a finished conversation request, as one result."""
    reader = ChatReader(chat)
    for event in events:
        last = reader.read(event)
    assert last.completion
    return last.completion


class ChatReader:
    """Converts the events of a request to chat events."""

    def __init__(self, chat: PreparedChat) -> None:
        self._output = AssistantOutput(chat)
        self._events: list[GenerationEvent] = []

    @property
    def message(self) -> Json:
        """The message so far, as OpenAI's object."""
        said = self._output.message
        return openai_message(said.text, said.reasoning, said.calls)

    def read(self, event: GenerationEvent) -> ChatEvent:
        """The parts that an event adds to the message."""
        self._events.append(event)
        deltas = self._output.read(event)
        return ChatEvent(
            text="".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
            reasoning="".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
            deltas=deltas,
            tokens=event.tokens,
            completion=self._completion() if event.finish_reason else None,
        )

    def _completion(self) -> ChatCompletion:
        said, whole = self._output.message, completion(self._events)
        fields = {name: getattr(whole, name) for name in Completion.__struct_fields__}
        return ChatCompletion(**fields | {"text": said.text, "reasoning": said.reasoning, "tool_calls": said.calls})


class ChatStream:
    """The answer to a conversation during generation: an iterator of `ChatEvent`s, and a context manager.

    Leaving the block, or `close`, cancels an incomplete answer. `message` has the answer so far.
    """

    def __init__(self, events: Generator[GenerationEvent, None, None], chat: PreparedChat) -> None:
        self._events, self._reader = events, ChatReader(chat)
        self.completion: ChatCompletion | None = None
        """The whole answer; None until it is complete."""

    @property
    def message(self) -> Json:
        """The message so far, as OpenAI's object: append it to the conversation."""
        return self._reader.message

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> ChatEvent:
        event = self._reader.read(next(self._events))
        self.completion = event.completion
        return event

    def close(self) -> None:
        """Cancels the answer if it is incomplete."""
        self._events.close()

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
