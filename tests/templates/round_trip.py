"""Messages with tool calls that a chat template itself renders, and the result of parsing the rendering."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cppbatch.chat.chat_format import ChatFormat, ChatTurn, PreparedChat
from cppbatch.chat.output_parser import AssistantMessage
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice
from cppbatch.errors import InvalidRequest
from tests.support.chat_families import message, tool

Json = dict[str, Any]

TOOLS = [
    tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, "days"),
    tool(
        "set_options",
        {
            "options": {"type": "object"}, "names": {"type": "array", "items": {"type": "string"}},
            "on": {"type": "boolean"}, "level": {"type": "number"}, "note": {"type": "string"},
        },
        "options", "names", "on", "level", "note",
    ),
    tool("ping"),
]  # fmt: skip
QUESTION: Json = {"role": "user", "content": "What is the weather, and what can be set?"}
END_TOKENS = ("<|eom_id|>", "<|tool_response>", "<|call|>", "<|calls|>")
"""Tokens that end a message with calls, where others end one of text."""
TEXT, THOUGHT = "I will look at that.", "The user wants to know something."


class AsTheyAre(ChatTemplate):
    """Renders conversations as they come."""

    def _arrange(self, messages: list[Json]) -> list[Json]:
        return messages


@dataclass(frozen=True)
class Said:
    """An assistant's message."""

    calls: tuple[tuple[str, Json], ...] = ()
    text: str = ""
    thought: str = ""

    @property
    def message(self) -> Json:
        """As OpenAI's API has it; ids of nine characters, which every template accepts."""
        calls = [
            {"id": f"callid{i:03}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(self.calls)
        ]
        found = {"role": "assistant", "content": self.text, "tool_calls": calls}
        return found | ({"reasoning_content": self.thought} if self.thought else {})


_WEATHER = ("get_weather", {"city": "Paris", "days": 3})
_MARKUP = ("get_weather", {"city": 'A "quoted" <b>word</b> & more'})
_NESTED = ("set_options", {"options": {"a": [1, 2, {"b": None}], "c": "x"}, "names": ["p", "q"], "on": True})

SAID = {
    "one call": Said((_WEATHER,)),
    "a string with quotes and tags": Said((_MARKUP,)),
    "nested arguments": Said((_NESTED,)),
    "two calls": Said((_WEATHER, _NESTED)),
    "text before a call": Said((_WEATHER,), text=TEXT),
    "a thought before a call": Said((_WEATHER,), thought=THOUGHT),
}


def completion(form: ChatFormat, said: Said, tools: Sequence[Json] = TOOLS) -> tuple[PreparedChat, str] | None:
    """The prompt and what the template writes for the message after it; None: it does not write all of it.

    Where the prompt leaves a thought open and the rendering has none, the text starts with the end of the thought.
    """
    template = form.template
    try:
        asked = form.render(ChatTurn([QUESTION], tools=list(tools), choice=ToolChoice()))
        whole = template.render([QUESTION, said.message], tools=list(tools), add_generation_prompt=False)
        answered = [QUESTION, {"role": "assistant", "content": TEXT}]
        plain = template.render(answered, tools=list(tools), add_generation_prompt=False)
    except InvalidRequest:
        return None
    ask = str(QUESTION["content"])
    written, header = whole.rpartition(ask)[2], asked.prompt.rpartition(ask)[2]
    needles = [name for name, _ in said.calls] + ["Paris"] * ("Paris" in str(said.calls))
    if not all(needle in written for needle in [*needles, said.text, said.thought]):
        return None
    turn_end = _common_end(whole, plain.rpartition(TEXT)[2])
    for end in (turn_end, *END_TOKENS):
        written = written.removesuffix(end)
    text = written.removeprefix(header)
    if text == written:
        text = written[len(_common_start(written, header)) :]
        text = text.removeprefix(header[header.rfind("<") :] if header.endswith(">") else "")
        tags = form.reasoning_tags
        opened = tags and header.rstrip().endswith(tags.start)
        text = tags.end + text if tags and opened and tags.end not in text else text
    return asked, text


def _common_start(a: str, b: str) -> str:
    """Up to where they differ, without the start of a tag."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[: a.rfind("<", 0, n)] if a.rfind("<", 0, n) > a.rfind(">", 0, n) else a[:n]


def _common_end(whole: str, end: str) -> str:
    """The part of `end` that `whole` ends with, from a tag or a line on."""
    starts = [i for i in range(len(end)) if i == 0 or end[i] in "<[\n"]
    return next((end[i:] for i in starts if whole.endswith(end[i:])), "")


def read(asked: PreparedChat, text: str) -> AssistantMessage:
    """What the parser makes of it, at once and character by character; both must agree."""
    whole = message(asked, [text])
    assert message(asked, text) == whole, text
    return whole


def differs(said: Said, got: AssistantMessage) -> str:
    """What was not parsed as it was written; "" if nothing."""
    calls = [(call.name, json.loads(call.arguments)) for call in got.calls]
    if calls != list(said.calls):
        return f"calls {calls}"
    if got.text.strip() != said.text:
        return f"text {got.text!r}"
    return f"thought {got.reasoning!r}" if got.reasoning.strip() != said.thought else ""


def check(source: str) -> Iterator[tuple[str, str | None]]:
    """For each of `SAID`: its name, and what differs; None: the template does not render it."""
    form = ChatFormat(AsTheyAre(source, bos="<s>", eos="</s>"))
    for name, said in SAID.items():
        found = completion(form, said)
        if found is None:
            yield name, None
            continue
        try:
            fault = differs(said, read(*found))
        except (AssertionError, ValueError) as error:
            fault = f"{type(error).__name__} {error}"
        yield name, f"{fault} of {found[1]!r}" if fault else ""
