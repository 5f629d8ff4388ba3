"""Anthropic's client and the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cppbatch.server.settings import ServerSettings
from tests.support.narrow import expect
from tests.support.scripted_chat import ChatServer

if TYPE_CHECKING:  # to import it takes two seconds, in each process of a run
    import anthropic
    from anthropic.types import Message

Json = dict[str, Any]

ALIAS = "claude-here"
GREEDY: dict[str, Any] = {"temperature": 0}


def ask(client: anthropic.Anthropic, **fields: Any) -> Message:
    from tests.integration import test_messages

    return test_messages.ask(client, **fields)


def streamed(client: anthropic.Anthropic, **fields: Any) -> Message:
    from tests.integration import test_messages

    return test_messages.streamed(client, **fields)


def text_of(message: Message) -> str:
    from tests.integration import test_messages

    return test_messages.text_of(message)


@pytest.fixture(scope="module")
def real(default_model: Path) -> Iterator[anthropic.Anthropic]:
    from tests.integration.test_messages import client_of

    server = ChatServer(default_model, ServerSettings(aliases=(ALIAS,)))
    yield client_of(server)
    server.stop()


def real_ask(client: anthropic.Anthropic, question: str, **fields: Any) -> Message:
    messages = [{"role": "user", "content": question}]
    return ask(client, model=ALIAS, max_tokens=32, messages=messages, **GREEDY, **fields)


def test_the_default_model_answers_anthropics_client(real: anthropic.Anthropic) -> None:
    message = real_ask(real, "What is 2+2? Answer with a number.")
    assert "4" in text_of(message)
    assert message.stop_reason in ("end_turn", "max_tokens")


def test_the_default_model_stops_at_a_stop_sequence(real: anthropic.Anthropic) -> None:
    message = real_ask(real, "Count from 1 to 9: 1, 2, 3, ...", stop_sequences=["5"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "5")
    assert text_of(message).rstrip(" ,\n").endswith("4")


def test_the_default_model_answers_in_json(real: anthropic.Anthropic) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}},
        "required": ["n"],
    }
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    message = real_ask(real, "What is 3+4?", output_config={"format": form})
    assert set(json.loads(text_of(message))) == {"n"}


def test_the_default_model_continues_the_assistants_message(real: anthropic.Anthropic) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    assert text_of(ask(real, model=ALIAS, messages=messages, **GREEDY)).startswith(" Paris")


@pytest.mark.parametrize("stream", [False, True])
def test_the_default_model_calls_a_tool_and_gets_its_result(real: anthropic.Anthropic, *, stream: bool) -> None:
    from anthropic.types import ToolUseBlock

    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    question = {"role": "user", "content": "How is the weather in Oslo?"}
    fields: Json = {"model": ALIAS, "max_tokens": 60, "tools": [{"name": "weather", "input_schema": city}]}
    once = {"type": "any", "disable_parallel_tool_use": True}
    asked: Json = {**fields, "messages": [question], "tool_choice": once}
    called = streamed(real, **asked) if stream else ask(real, **asked, **GREEDY)
    call = expect(ToolUseBlock, called.content[-1])
    assert (called.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny in Oslo."}
    said = {"role": "assistant", "content": [block.to_dict() for block in called.content]}
    messages = [question, said, {"role": "user", "content": [result]}]
    assert ask(real, **{**fields, "tools": []}, messages=messages, **GREEDY).content
