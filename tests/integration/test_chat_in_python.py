"""Chat in Python is the chat of the server: the same model gives the same messages to the same conversations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, InvalidRequest, LocalEngine, SamplingParams
from cppbatch.engine.chat_results import ChatCompletion
from tests.support.scripted_chat import ChatServer

SETTINGS: dict[str, Any] = {"n_ctx": 2048, "n_parallel": 4, "n_threads": 1, "spec": "off"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]},
    },
}
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
HELLO: list[dict[str, object]] = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is a lighthouse?"},
]


@pytest.fixture(scope="module")
def answers(tiny_llama: Path) -> dict[str, Any]:
    """The server's messages: of a conversation, a call, and an answer of a schema."""
    server = ChatServer(tiny_llama, **SETTINGS)

    def ask(**fields: Any) -> Any:
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 100, **fields}
        (choice,) = server.post("/v1/chat/completions", body)["choices"]
        return choice["message"]

    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    found = {
        "text": ask(),
        "call": ask(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False),
        "json": ask(response_format=schema),
    }
    server.stop()
    return found


def test_answers_calls_and_json_are_those_of_the_server(tiny_llama: Path, answers: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    with BatchInferenceEngine(tiny_llama, **SETTINGS) as engine:
        answer = engine.chat(HELLO, params)
        call = engine.chat(HELLO, params, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        schema = SamplingParams(temperature=0, max_tokens=100, json_schema=SCHEMA)
        written = engine.chat(HELLO, schema)
        compact = engine.chat(HELLO, SamplingParams(temperature=0, json_schema=SCHEMA, compact_json=True))
        streamed = "".join(event.text for event in engine.chat_stream(HELLO, params))
    assert answer.text == answers["text"]["content"] == streamed
    assert answer.message == {"role": "assistant", "content": answer.text}
    expected = answers["call"]["tool_calls"][0]["function"]
    assert [(called.name, called.arguments) for called in call.tool_calls] == [
        (expected["name"], expected["arguments"])
    ]
    assert written.text == answers["json"]["content"]
    assert compact.text in ('{"colour":"red"}', '{"colour":"blue"}')


async def test_with_asyncio_too(tiny_llama: Path, answers: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    async with LocalEngine(tiny_llama, **SETTINGS) as engine:
        answer = await engine.chat(HELLO, params)
        assert isinstance(answer, ChatCompletion)
        assert answer.text == answers["text"]["content"]
        stream = engine.chat_stream(HELLO, params)
        assert "".join([event.text async for event in stream]) == answer.text
        assert stream.completion
        assert stream.completion.message == stream.message == answer.message
        several = await asyncio.gather(*(engine.chat(f"{i} + {i}?", params) for i in range(4)))
        assert all(each.text for each in several)
        async with engine.chat_stream("Tell me a long story.", SamplingParams(temperature=0)) as left:
            async for event in left:
                if event.text:
                    break
        while (await engine.stats()).running:  # noqa: ASYNC110  # it is cancelled within a step
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequest, match=r"^messages: has .* tokens"):
            await engine.chat("long " * 5000)
        assert left.completion is None
        assert left.message["content"]
