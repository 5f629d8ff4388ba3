"""Conversations for chat templates, as clients of OpenAI's API write them."""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

from cppbatch.chat.capabilities import TemplateCapabilities
from cppbatch.chat.template import ChatTemplate

Message = dict[str, Any]
BOS, EOS = "<s>", "</s>"


def template_of(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, bos=BOS, eos=EOS)


class Conversation(NamedTuple):
    """The arguments of a template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    continue_final_message: bool = False


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def call(id_: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("weather", "Tells the weather.", city={"type": "string", "description": "Its name, as in “Köln”."}),
    _tool("add", "Adds <two>.", a={"type": "number", "description": "One"}, b={"type": "number", "description": "Two"}),
]
SYSTEM = {"role": "system", "content": "You are terse & 'polite'."}
HELLO = {"role": "user", "content": "Hello <b>there</b>! Grüße, 你好.\nA second line."}
HI = {"role": "assistant", "content": "Hi. What can I do?"}
SUM = {"role": "user", "content": "How much is 2 + 2?"}
FOUR = {"role": "assistant", "content": "It is four."}
THANKS = {"role": "user", "content": "Thanks, and 3 + 3?"}
WEATHER = {"role": "user", "content": "What's the weather in Köln?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [call("call12345", "weather", city="Köln")]}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": '{"sky": "clear"}'}
CLEAR = {"role": "assistant", "content": "The sky is clear."}
THOUGHT = {"role": "assistant", "content": "It is four.", "reasoning_content": "Two and two\nmake four."}

CONVERSATIONS = {
    "one question": Conversation([HELLO]),
    "system message": Conversation([SYSTEM, HELLO]),
    "several turns": Conversation([SYSTEM, HELLO, HI, SUM, FOUR, THANKS]),
    "several turns without a system message": Conversation([HELLO, HI, SUM]),
    "tools that may be called": Conversation([SYSTEM, WEATHER], TOOLS),
    "a tool's result": Conversation([WEATHER, CALL, RESULT], TOOLS),
    "an answer after a tool's result": Conversation([SYSTEM, WEATHER, CALL, RESULT, CLEAR, SUM], TOOLS),
    "reasoning": Conversation([SUM, THOUGHT, THANKS]),
    "thinking on": Conversation([SYSTEM, SUM, THOUGHT, THANKS], None, {"enable_thinking": True}),
    "thinking off": Conversation([SYSTEM, SUM], None, {"enable_thinking": False, "reasoning_effort": "low"}),
    "an unfinished answer": Conversation(
        [SYSTEM, SUM, {"role": "assistant", "content": "It is"}], continue_final_message=True
    ),
    "an unfinished answer that ends with a space": Conversation(
        [HELLO, HI, SUM, {"role": "assistant", "content": "The sum of both, 2 + 2, is "}], continue_final_message=True
    ),
    "parts of text": Conversation(
        [
            {"role": "system", "content": [part("Be terse."), part(" Be polite.")]},
            {"role": "user", "content": [part("How much"), part(" is 2 + 2?")]},
            {"role": "assistant", "content": [part("It is"), part(" four.")]},
            THANKS,
        ]
    ),
    "a developer's message": Conversation([{"role": "developer", "content": "Be terse."}, HELLO]),
}


def for_reference(messages: list[Message], capabilities: TemplateCapabilities) -> list[Message]:
    """The same with what cppbatch adapts to a template on purpose, and transformers leaves to its caller."""
    messages = copy.deepcopy(messages)
    if not capabilities.system and len(messages) > 1 and messages[0]["role"] in ("system", "developer"):
        (first, second), rest = messages[:2], messages[2:]
        texts = [part["text"] for message in (first, second) for part in _parts(message)]
        messages = [{**second, "content": "\n".join(texts)}, *rest]
    for message in messages:
        if message["role"] == "developer" and not capabilities.developer:
            message["role"] = "system"
        if isinstance(message["content"], list) and message["role"] not in capabilities.parts:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if message["content"] is None and not capabilities.null_content:
            message["content"] = ""
        for each in message.get("tool_calls", []):
            if not capabilities.string_arguments:
                each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    return messages


def _parts(message: Message) -> list[dict[str, str]]:
    content = message["content"]
    return content if isinstance(content, list) else [part(content)]
