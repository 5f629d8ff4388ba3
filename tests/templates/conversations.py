"""Conversations of agents with every chat template: what is refused, what is lost, which prompts are arranged.

Each word in a conversation must be in its prompt, whatever API it comes through. Reasoning counts where the template
writes it without the text beside it: templates omit that of earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.chat.chat_format import ChatFormat, ChatTurn
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice
from cppbatch.errors import InvalidRequest
from cppbatch.server.api.anthropic.conversion import message_turn
from cppbatch.server.api.anthropic.types import MessagesRequest
from cppbatch.server.api.openai.chat_types import ChatCompletionRequest
from cppbatch.server.api.responses.conversion import response_turn
from cppbatch.server.api.responses.types import ResponsesRequest
from tests.templates.round_trip import TOOLS, AsTheyAre, Json

_WORDS = re.compile(r"word-[a-z]+\d?")
_OWN_ID, _FOREIGN_ID, _LAST = "callid000", "call_Ab3dEf6hIj9kLmN0pQrStUv", "callid001"


def say(role: str, word: str, **more: Any) -> Json:
    return {"role": role, "content": f"word-{word}", **more}


def called(*ids: str, **more: Any) -> Json:
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": f"word-city{i}"})},
        }
        for i, call_id in enumerate(ids)
    ]
    return {"role": "assistant", "content": None, **more, "tool_calls": calls}


def result(call_id: str, i: int = 0) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "name": "get_weather", "content": f"word-result{i}"}


ASK, ANSWER, AGAIN = say("user", "ask"), say("assistant", "answer"), say("user", "again")
TEXT, THOUGHT = {"content": "word-text"}, {"reasoning_content": "word-thought"}
CALL = [ASK, called(_OWN_ID), result(_OWN_ID)]
WITHOUT_TEXT = [ASK, called(_OWN_ID, **THOUGHT), result(_OWN_ID)]

SITUATIONS: dict[str, list[Json]] = {
    "a second system message": [say("system", "first"), say("system", "second"), ASK],
    "a developer message": [say("developer", "first"), ASK],
    "a system and a developer message": [say("system", "first"), say("developer", "second"), ASK],
    "two developer messages": [say("developer", "first"), say("developer", "second"), ASK],
    "a later system message": [say("system", "first"), ASK, ANSWER, say("system", "later"), AGAIN],
    "a system message at the end": [ASK, ANSWER, AGAIN, say("system", "later")],
    "its own text": [ASK, ANSWER, AGAIN],
    "its own thought and text": [ASK, {**ANSWER, **THOUGHT}, AGAIN],
    "a call": CALL,
    "a call and text": [ASK, called(_OWN_ID, **TEXT), result(_OWN_ID)],
    "a call and a thought": WITHOUT_TEXT,
    "a call, text and a thought": [ASK, called(_OWN_ID, **TEXT, **THOUGHT), result(_OWN_ID)],
    "a call and text, and what follows": [ASK, called(_OWN_ID, **TEXT), result(_OWN_ID), ANSWER, AGAIN],
    "two calls": [ASK, called(_OWN_ID, _LAST), result(_OWN_ID), result(_LAST, 1)],
    "foreign ids": [ASK, called(_FOREIGN_ID), result(_FOREIGN_ID), ANSWER, AGAIN],
    "the user after a result": [*CALL, AGAIN],
    "two messages of the user": [ASK, AGAIN],
    "two messages of the assistant": [ASK, ANSWER, say("assistant", "more"), AGAIN],
    "the assistant first": [ANSWER, ASK],
}


def through_chat(messages: list[Json]) -> list[Json]:
    body = msgspec.convert({"messages": messages}, ChatCompletionRequest)
    return body.turn().messages


def through_responses(messages: list[Json]) -> list[Json]:
    items: list[Json] = []
    for message in messages:
        if message["role"] == "tool":
            items.append({
                "type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]
            })  # fmt: skip
            continue
        if thought := message.get("reasoning_content"):
            items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        ]
    return response_turn(msgspec.convert({"input": items}, ResponsesRequest)).messages


def through_messages(messages: list[Json]) -> list[Json]:
    """Anthropic's API has no developer messages."""
    said: list[Json] = []
    for message in messages:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            said.append({"role": "user", "content": [block]})
            continue
        blocks: list[Json] = []
        if thought := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
        said.append({"role": message["role"].replace("developer", "system"), "content": blocks})
    return message_turn(msgspec.convert({"max_tokens": 9, "messages": said}, MessagesRequest)).messages


APIS = {"chat completions": through_chat, "responses": through_responses, "messages": through_messages}


def prompt_of(template: ChatTemplate, messages: list[Json]) -> str:
    """Raises `InvalidRequest` if the template refuses it."""
    tools = TOOLS if any("tool_calls" in message for message in messages) else []
    return ChatFormat(template).render(ChatTurn(messages, tools=tools, choice=ToolChoice())).prompt


def missing(prompt: str, messages: list[Json], *, thought: bool) -> list[str]:
    """The words that are not in the prompt."""
    return [
        word for word in _WORDS.findall(repr(messages)) if word not in prompt and (thought or "thought" not in word)
    ]


def check(source: str) -> Iterator[tuple[str, str, str]]:
    """For each API and situation: what is wrong with its prompt; "" if nothing."""
    template, plain = (kind(source, bos="<s>", eos="</s>") for kind in (ChatTemplate, AsTheyAre))
    try:
        writes_thoughts = "word-thought" in prompt_of(plain, WITHOUT_TEXT)
    except InvalidRequest:
        writes_thoughts = False
    for api, through in APIS.items():
        for name, messages in SITUATIONS.items():
            is_kept = writes_thoughts and "call" in name
            given = through(messages)
            try:
                before = prompt_of(plain, given)
            except InvalidRequest:
                before = ""
            try:
                prompt = prompt_of(template, given)
            except InvalidRequest as error:
                yield api, name, f"refused: {error}"
                continue
            if lost := missing(prompt, messages, thought=is_kept):
                yield api, name, f"lost: {', '.join(lost)}"
            elif prompt != before and before and not missing(before, messages, thought=is_kept):
                yield api, name, "changed"
            else:
                yield api, name, "" if prompt == before else "arranged"


def write_all(files: Sequence[Path]) -> bool:
    """Whether nothing is refused or lost, and at most one template of twenty arranges what it could write."""
    counts = dict.fromkeys(("refused", "lost", "changed", "arranged", ""), 0)
    for file in files:
        for api, name, fault in check(file.read_text("utf-8")):
            counts[fault.partition(":")[0]] += 1
            if fault not in ("", "arranged"):
                print(f"{file.stem}: {api}: {name}: {fault}")
    print(
        f"{sum(counts.values())} conversations with {len(files)} templates through {len(APIS)} APIs: refused "
        f"{counts['refused']}, lost {counts['lost']}, arranged {counts['arranged']}, changed though complete "
        f"{counts['changed']}, as before {counts['']}"
    )
    return not (counts["refused"] or counts["lost"]) and counts["changed"] <= 0.05 * sum(counts.values())
