"""The output items of a response, and the events of a stream that report their changes."""

from __future__ import annotations

from msgspec import UNSET

from cppbatch.engine.request import TokenLogprob
from cppbatch.server.answer.logprobs import ChatTokenLogprob, chat_token_logprobs
from cppbatch.server.answer.response import BlockChange, ContentBlock
from cppbatch.server.api.responses.tools import UsedTools
from cppbatch.server.api.responses.types import (
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    CustomToolCallItem,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponsesEvent,
    StreamTokenLogprob,
    StreamTopLogprob,
)
from cppbatch.server.models.serving import new_id

_ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_", "custom": "ctc_"}


class ItemBuilder:
    """Builds the output item of one content block."""

    def __init__(self, block: ContentBlock, tools: UsedTools) -> None:
        self._block = block
        namespace, self._name = tools.client_name(block.name)
        self._namespace = UNSET if namespace is None else namespace
        self._index = block.index
        self._id = new_id(_ID_PREFIXES[block.kind])
        self._status: ItemStatus = "in_progress"
        self._logprobs: list[ChatTokenLogprob] = []

    def item(self, *, empty: bool = False) -> OutputItem:
        """The current item; with `empty`, as it was at the start."""
        block = self._block
        if block.kind == "call":
            arguments = "" if empty else block.text
            return FunctionCallItem(
                id=self._id,
                status=self._status,
                call_id=block.call_id,
                name=self._name,
                namespace=self._namespace,
                arguments=arguments,
            )
        if block.kind == "custom":
            text = "" if empty else block.text
            return CustomToolCallItem(
                id=self._id, call_id=block.call_id, name=self._name, namespace=self._namespace, input=text
            )
        if block.kind == "reasoning":
            reasoning = [] if empty else [ReasoningText(text=block.text)]
            return ReasoningItem(id=self._id, status=self._status, content=reasoning)
        return MessageItem(id=self._id, status=self._status, content=[] if empty else [self._text()])

    def start(self) -> list[ResponsesEvent]:
        """The events for the item's start."""
        added = OutputItemAdded(output_index=self._index, item=self.item(empty=True))
        if self._block.kind in ("call", "custom"):
            return [added]
        part = ReasoningText(text="") if self._block.kind == "reasoning" else OutputText(text="")
        return [added, ContentPartAdded(item_id=self._id, output_index=self._index, part=part)]

    def delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> ResponsesEvent:
        """The event for more text, reasoning or arguments. `logprobs`: of a text's tokens."""
        if self._block.kind == "call":
            return FunctionCallArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)
        if self._block.kind == "custom":
            return CustomToolCallInputDelta(item_id=self._id, output_index=self._index, delta=text)
        if self._block.kind == "reasoning":
            return ReasoningTextDelta(item_id=self._id, output_index=self._index, delta=text)
        self._logprobs += logprobs
        shown = _without_bytes(logprobs)
        return OutputTextDelta(item_id=self._id, output_index=self._index, delta=text, logprobs=shown)

    def stop(self, status: ItemStatus) -> list[ResponsesEvent]:
        """The events for the item's end."""
        self._status = status
        block, item_id, index = self._block, self._id, self._index
        item = OutputItemDone(output_index=index, item=self.item())
        if block.kind == "call":
            return [FunctionCallArgumentsDone(item_id=item_id, output_index=index, arguments=block.text), item]
        if block.kind == "custom":
            return [CustomToolCallInputDone(item_id=item_id, output_index=index, input=block.text), item]
        if block.kind == "reasoning":
            part = ContentPartDone(item_id=item_id, output_index=index, part=ReasoningText(text=block.text))
            return [ReasoningTextDone(item_id=item_id, output_index=index, text=block.text), part, item]
        shown = _without_bytes(self._logprobs)
        done = OutputTextDone(item_id=item_id, output_index=index, text=block.text, logprobs=shown)
        return [done, ContentPartDone(item_id=item_id, output_index=index, part=self._text()), item]

    def _text(self) -> OutputText:
        return OutputText(text=self._block.text, logprobs=self._logprobs)


class OutputItems:
    """All output items of a response."""

    def __init__(self, tools: UsedTools) -> None:
        self._tools = tools
        self._builders: list[ItemBuilder] = []
        self._logprobs: list[ChatTokenLogprob] = []  # of tokens whose text is still pending

    def items(self) -> list[OutputItem]:
        """The current items."""
        return [builder.item() for builder in self._builders]

    def apply(
        self, changes: list[BlockChange], logprobs: list[TokenLogprob] | None = None, status: ItemStatus = "completed"
    ) -> list[ResponsesEvent]:
        """The events for these changes.

        `logprobs`: of the token that caused the changes, None if they are not wanted; omitted for reasoning and tool
        calls. `status`: of items that end.
        """
        self._logprobs += chat_token_logprobs(logprobs or [])
        events: list[ResponsesEvent] = []
        for step, block, text in changes:
            if step == "start":
                self._builders.append(ItemBuilder(block, self._tools))
                events += self._builders[-1].start()
            elif step == "delta":
                events.append(self._builders[-1].delta(text, self._take_logprobs(block, text)))
            else:
                events += self._builders[-1].stop(status)
        return events

    def _take_logprobs(self, block: ContentBlock, text: str) -> list[ChatTokenLogprob]:
        """The pending log-probabilities of a delta's tokens; none for reasoning and tool calls.

        Tags and white space before a block of text are not in it, but have tokens.
        """
        taken = self._logprobs
        if block.kind != "text":
            self._logprobs = taken[-1:]  # this token may also have the text that follows
            return []
        self._logprobs = []
        return _last_with_text(taken, text) if block.text == text else taken


def _last_with_text(logprobs: list[ChatTokenLogprob], text: str) -> list[ChatTokenLogprob]:
    """The last tokens, from the one in which this text starts; all if it is not found."""
    start = bytes(byte for entry in logprobs for byte in entry.bytes).rfind(text.encode())
    for i, entry in enumerate(logprobs):
        start -= len(entry.bytes)
        if start < 0:
            return logprobs[i:]
    return logprobs


def _without_bytes(logprobs: list[ChatTokenLogprob]) -> list[StreamTokenLogprob]:
    return [
        StreamTokenLogprob(
            token=entry.token,
            logprob=entry.logprob,
            top_logprobs=[StreamTopLogprob(token=top.token, logprob=top.logprob) for top in entry.top_logprobs],
        )
        for entry in logprobs
    ]
