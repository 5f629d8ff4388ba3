"""The log-probabilities of a response are those of its message's tokens, however the engine's events are cut."""

from __future__ import annotations

import msgspec
import pytest

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, TokenLogprob
from cppbatch.server.api.responses.create_response import ResponsesBuilder
from cppbatch.server.api.responses.tools import UsedTools
from cppbatch.server.api.responses.types import MessageItem, OutputTextDelta, ResponsesRequest
from cppbatch.server.models.serving import ResolvedRequest
from tests.support.chat_families import QUESTION, chat_format

TOKENS = [
    "<think>",
    "\n",
    "I t",
    "hink.",
    "\n",
    "</",
    "think",
    ">\n",
    "\n",
    "It",
    " is",
    " STO",
    "NE",
    ".",
    " STO",
    "P",
]
MESSAGE = ["It", " is", " STO", "NE", "."]
TEXTS = ["".join(TOKENS[:i]) for i in range(14)]
"""The text that is certain before each token: what may be the start of the stop string " STOP" is held back."""
TEXTS = [*(text.removesuffix(" STO") for text in TEXTS), *(["".join(TOKENS[:14])] * 3)]


def engine_events(starts: list[int]) -> list[GenerationEvent]:
    """The engine's events; each of them starts with one of these tokens."""
    events = []
    for start, end in zip(starts, [*starts[1:], len(TOKENS)], strict=True):
        entries = [TokenLogprob(token=i, piece=TOKENS[i].encode(), logprob=-float(i)) for i in range(start, end)]
        event = GenerationEvent(
            request_id="r",
            text=TEXTS[end].removeprefix(TEXTS[start]),
            tokens=list(range(start, end)),
            token_texts=TOKENS[start:end],
            logprobs=entries,
        )
        events.append(event)
    events[-1] = msgspec.structs.replace(events[-1], finish_reason=FinishReason.STOP, stop=" STOP")
    return events


def builder() -> ResponsesBuilder:
    body = ResponsesRequest(input="hello", top_logprobs=0)
    request = GenerationRequest(id="r", prompt="hello", params=SamplingParams(logprobs=0))
    chat = chat_format("hermes").render(ChatTurn(QUESTION))
    return ResponsesBuilder(body, "model", ResolvedRequest("resp_1", [request], {}, chat), UsedTools([], {}))


@pytest.mark.parametrize("starts", [[0], [*range(16)], [0, 3, 10, 12], [0, 9, 11, 13, 15], [0, 1, 8, 14]])
def test_they_are_those_of_the_messages_tokens(starts: list[int]) -> None:
    built = builder()
    deltas: list[OutputTextDelta] = []
    for event in engine_events(starts):
        deltas += [each.data for each in built.stream_events(0, event) if isinstance(each.data, OutputTextDelta)]
    message = built._items.items()[-1]
    assert isinstance(message, MessageItem)
    assert message.content[0].text == "It is STONE."
    tokens = [entry.token for entry in message.content[0].logprobs]
    assert tokens == MESSAGE
    assert [entry.logprob for entry in message.content[0].logprobs] == [-9, -10, -11, -12, -13]
    assert [entry.token for delta in deltas for entry in delta.logprobs] == tokens
