"""A response's output items, and the events that tell of them."""

from __future__ import annotations

from cppbatch.engine.request import TokenLogprob
from cppbatch.server.content_blocks import BlockChange, ContentBlock
from cppbatch.server.response import Json
from cppbatch.server.response_logprobs import ChatTokenLogprob, chat_token_logprobs
from cppbatch.server.serving import new_id

_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class Item:
    """One part of the message as an output item."""

    def __init__(self, part: ContentBlock) -> None:
        self.part = part
        self.status = "in_progress"
        self.logprobs: list[ChatTokenLogprob] = []
        self._id = new_id(_PREFIXES[part.kind])
        self._place = {"item_id": self._id, "output_index": part.index}
        self._in_content = {**self._place, "content_index": 0}

    def shown(self, *, empty: bool = False) -> Json:
        """As it is by now; or as it was when it began."""
        head = {"id": self._id, "status": self.status}
        if self.part.kind == "call":
            call = {"call_id": self.part.call_id, "name": self.part.name, "arguments": "" if empty else self.part.text}
            return {**head, "type": "function_call", **call}
        content = [] if empty else [self._content()]
        if self.part.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def opened(self) -> list[Json]:
        """It begins."""
        item = {"type": "response.output_item.added", "output_index": self.part.index, "item": self.shown(empty=True)}
        if self.part.kind == "call":
            return [item]
        return [item, {"type": "response.content_part.added", **self._in_content, "part": self._content(empty=True)}]

    def added(self, text: str, logprobs: list[ChatTokenLogprob]) -> Json:
        """It goes on."""
        if self.part.kind == "call":
            return {"type": "response.function_call_arguments.delta", **self._place, "delta": text}
        if self.part.kind == "reasoning":
            return {"type": "response.reasoning_text.delta", **self._in_content, "delta": text}
        self.logprobs += logprobs
        shown = _without_bytes(logprobs)
        return {"type": "response.output_text.delta", **self._in_content, "delta": text, "logprobs": shown}

    def closed(self, status: str) -> list[Json]:
        """It is over."""
        self.status = status
        item = {"type": "response.output_item.done", "output_index": self.part.index, "item": self.shown()}
        text = self.part.text
        if self.part.kind == "call":
            return [{"type": "response.function_call_arguments.done", **self._place, "arguments": text}, item]
        done: Json = {"type": "response.reasoning_text.done", **self._in_content, "text": text}
        if self.part.kind == "text":
            done |= {"type": "response.output_text.done", "logprobs": _without_bytes(self.logprobs)}
        return [done, {"type": "response.content_part.done", **self._in_content, "part": self._content()}, item]

    def _content(self, *, empty: bool = False) -> Json:
        text = "" if empty else self.part.text
        if self.part.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if empty else self.logprobs}


class Items:
    """All output items of a response."""

    def __init__(self, *, wants_logprobs: bool) -> None:
        self._all: list[Item] = []
        self._wants_logprobs = wants_logprobs
        self._logprobs: list[ChatTokenLogprob] = []  # of tokens whose text has yet to come

    def shown(self) -> list[Json]:
        """As they are by now."""
        return [item.shown() for item in self._all]

    def change(
        self, changes: list[BlockChange], logprobs: list[TokenLogprob] | None = None, status: str = "completed"
    ) -> list[Json]:
        """The API's events for what has changed. `logprobs`: of the tokens that this has come from; those of thoughts
        and calls are shown nowhere. `status`: of items that are over now."""
        if self._wants_logprobs:
            self._logprobs += chat_token_logprobs(logprobs or [])
        events: list[Json] = []
        for step, part, text in changes:
            if step == "start":
                self._all.append(Item(part))
                events += self._all[-1].opened()
            elif step == "delta":
                events.append(self._all[-1].added(text, self._logprobs))
                self._logprobs = []
            else:
                events += self._all[-1].closed(status)
        return events


def _without_bytes(logprobs: list[ChatTokenLogprob]) -> list[Json]:
    """As events have them."""
    return [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "top_logprobs": [{"token": top.token, "logprob": top.logprob} for top in entry.top_logprobs],
        }
        for entry in logprobs
    ]
