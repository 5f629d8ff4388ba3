"""Anthropic's message objects, whole and streamed."""

from __future__ import annotations

import msgspec

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.engine.request import GenerationEvent
from cppbatch.server.api_errors import anthropic_error, api_error
from cppbatch.server.assistant_output import AssistantOutput
from cppbatch.server.content_blocks import BlockChange, ContentBlock, ContentBlocks
from cppbatch.server.response import Json, ResponseBuilder, ServerSentEvent
from cppbatch.server.serving import new_id


class MessageReply(ResponseBuilder):
    """`/v1/messages`. `most`: tokens that were asked for."""

    def __init__(self, model: str, turn: PreparedChat, most: int) -> None:
        super().__init__()
        self.id = new_id("msg_")
        self._model = model
        self._most = most
        self._assistant = AssistantOutput(turn)
        self._parts = ContentBlocks()

    def build(self, completions: list[list[GenerationEvent]]) -> Json:
        """As in `ResponseBuilder`."""
        for event in completions[0]:
            self._read(event)
        return self._message(self._blocks(), self._end(), self._usage())

    def stream_start(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`. How many tokens the prompt has is known in the end only."""
        usage = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return [_frame("message_start", message=message)]

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [_block_frame(change) for change in self._read(event)]

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [_frame("message_delta", delta=self._end(), usage=self._usage()), _frame("message_stop")]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [ServerSentEvent(anthropic_error(api_error(error)), "error")]

    def _read(self, event: GenerationEvent) -> list[BlockChange]:
        """What an event changes."""
        changes = self._parts.read(self._assistant.read(event))
        return [*changes, *self._parts.close()] if event.finish_reason else changes

    def _message(self, content: list[Json], end: Json, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": usage,
        }

    def _blocks(self) -> list[Json]:
        """All but a call that was cut off: half its arguments are worse than none."""
        return [_block(part) for part in self._parts.all if part.kind != "call" or _arguments(part) is not None]

    def _end(self) -> Json:
        stop = self.last_events[0].stop
        return {"stop_reason": "stop_sequence" if stop else self._stop_reason(), "stop_sequence": stop}

    def _stop_reason(self) -> str:
        if self._assistant.finish_reason == "tool_calls":
            return "tool_use"
        if self._assistant.finish_reason == "timeout":
            return "pause_turn"  # the client may send it back to have it continued
        if self._assistant.finish_reason == "stop":
            return "end_turn"
        return "max_tokens" if self.token_counts().completion >= self._most else "model_context_window_exceeded"

    def _usage(self) -> Json:
        prompt, cached, completion = self.token_counts()
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": completion,
            "output_tokens_details": {"thinking_tokens": self._assistant.reasoning_tokens},
        }


def _block(part: ContentBlock) -> Json:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _arguments(part)}


def _arguments(part: ContentBlock) -> Json | None:
    """The arguments of a call, None if they are not whole."""
    try:
        return msgspec.json.decode(part.text or "{}", type=Json)
    except msgspec.DecodeError:
        return None


def _block_frame(change: BlockChange) -> ServerSentEvent:
    step, part, text = change
    if step == "start":
        empty = ContentBlock(part.index, part.kind, call_id=part.call_id, name=part.name)
        return _frame("content_block_start", index=part.index, content_block=_block(empty))
    if step == "stop":
        return _frame("content_block_stop", index=part.index)
    if part.kind == "text":
        delta = {"type": "text_delta", "text": text}
    elif part.kind == "reasoning":
        delta = {"type": "thinking_delta", "thinking": text}
    else:
        delta = {"type": "input_json_delta", "partial_json": text}
    return _frame("content_block_delta", index=part.index, delta=delta)


def _frame(kind: str, **fields: object) -> ServerSentEvent:
    return ServerSentEvent({"type": kind, **fields}, kind)
