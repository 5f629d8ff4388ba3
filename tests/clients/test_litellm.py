"""litellm: as a library, in front of each API of the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

from tests.clients.serving import (
    CONCLUSION,
    KEY,
    MODEL,
    QUESTION,
    REASONS_THEN_ANSWERS,
    THOUGHT,
    WEATHER_SCHEMA,
    Serving,
    check_weather,
)

ASK: Any = [{"role": "user", "content": QUESTION}]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}
# litellm's provider, and whether its address ends in /v1
PROVIDERS = {"openai": True, "hosted_vllm": True, "llamafile": True, "lm_studio": True, "anthropic": False}


class Person(BaseModel):
    name: str
    age: int


def asked(server: Serving, provider: str = "openai", **fields: Any) -> dict[str, Any]:
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": server.v1 if PROVIDERS[provider] else server.url,
        "api_key": KEY,
        "messages": ASK,
        "max_tokens": 24,
        "temperature": 0,
        "num_retries": 0,
        "timeout": 60,
        **fields,
    }


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_16_at_once_are_the_same_as_alone_and_as_streams(provider: str, server: Serving) -> None:
    questions = [f"Name the capital of {country}." for country in ("France", "Peru", "Japan", "Norway")]

    def about(question: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}]

    async def streamed(question: str) -> str:
        text = ""
        async for chunk in await litellm.acompletion(**asked(server, provider, messages=about(question), stream=True)):
            text += chunk.choices[0].delta.content or ""
        return text

    alone = [litellm.completion(**asked(server, provider, messages=about(question))) for question in questions]
    texts = [answer.choices[0].message.content for answer in alone]
    assert "Paris" in texts[0]
    assert list(await asyncio.gather(*(streamed(question) for question in questions * 4))) == texts * 4
    for answer in alone:
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.prompt_tokens > 5


def test_a_stream_is_put_together_with_its_usage(provider: str, server: Serving) -> None:
    whole = litellm.completion(**asked(server, provider))
    chunks = list(litellm.completion(**asked(server, provider), stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_required_tool_is_called(provider: str, server: Serving) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 128, "parallel_tool_calls": False}
    if provider in ("llamafile", "lm_studio"):
        fields["allowed_openai_params"] = ["parallel_tool_calls"]
    answer = litellm.completion(**asked(server, provider, **fields))
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    check_weather(json.loads(call.function.arguments))
    parts = list(litellm.completion(**asked(server, provider, **fields), stream=True))
    built = litellm.stream_chunk_builder(parts, messages=ASK)
    streamed = built.choices[0].message.tool_calls[0].function.arguments
    assert json.loads(streamed) == json.loads(call.function.arguments)


def test_a_pydantic_class_is_filled(provider: str, server: Serving) -> None:
    messages = [{"role": "user", "content": "Alice is 30 years old."}]
    answer = litellm.completion(**asked(server, provider, messages=messages, response_format=Person, max_tokens=64))
    Person.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_reasoning_is_apart_from_the_answer(provider: str, reasoning_server: Serving) -> None:
    fields: Any = {"max_tokens": 64, "extra_body": {"grammar": REASONS_THEN_ANSWERS}}
    message = litellm.completion(**asked(reasoning_server, provider, **fields)).choices[0].message
    assert (message.reasoning_content.strip(), message.content) == (THOUGHT, CONCLUSION)
    chunks = list(litellm.completion(**asked(reasoning_server, provider, **fields), stream=True))
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks).strip() == THOUGHT
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == CONCLUSION


def test_responses_and_messages_through_litellm(server: Serving) -> None:
    fields: Any = {"model": f"openai/{MODEL}", "api_base": server.v1, "api_key": KEY}
    response = litellm.responses(input=QUESTION, max_output_tokens=24, temperature=0, **fields)
    text = "".join(part.text for item in response.output if item.type == "message" for part in item.content)
    assert "Paris" in text
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    deltas = [
        event.delta
        for event in litellm.responses(input=QUESTION, max_output_tokens=24, temperature=0, stream=True, **fields)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == text


def test_text_completions(server: Serving) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt=["One, two, three,", "A, B, C,"],
        api_base=server.v1,
        api_key=KEY,
        max_tokens=4,
        temperature=0,
    )
    assert "four" in answer.choices[0].text
    assert "D" in answer.choices[1].text


def test_embeddings_are_those_of_the_server(embedding_server: Serving) -> None:
    texts = ["A cat sat on the mat.", "Tax law of 1987"]
    answer = litellm.embedding(model=f"openai/{MODEL}", input=texts, api_base=embedding_server.v1, api_key=KEY)
    direct = embedding_server.post("/v1/embeddings", {"input": texts})
    for mine, theirs in zip(answer.data, direct["data"], strict=True):
        assert mine["embedding"] == pytest.approx(theirs["embedding"], abs=1e-5)
    assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"]


def test_errors_are_litellms_own(provider: str, server: Serving, one_at_a_time: Serving) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked(server, provider, api_key="wrong"))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked(server, provider, temperature=-1))
    with one_at_a_time.filled(), pytest.raises(litellm.RateLimitError):
        litellm.completion(**asked(one_at_a_time, provider, max_retries=0))


async def test_a_stream_that_is_left_ends_its_request(server: Serving) -> None:
    stream = await litellm.acompletion(**asked(server, max_tokens=900, stream=True, extra_body={"ignore_eos": True}))
    async for _ in stream:
        break
    assert server.stats()["running"] == 1
    await stream.aclose()
    server.wait_idle()


async def test_a_cancelled_task_ends_its_request(server: Serving) -> None:
    task = asyncio.create_task(litellm.acompletion(**asked(server, max_tokens=900, extra_body={"ignore_eos": True})))
    await asyncio.to_thread(server.wait, lambda stats: stats["running"] == 1)
    task.cancel()
    await asyncio.to_thread(server.wait_idle)
    with pytest.raises(asyncio.CancelledError):
        await task
