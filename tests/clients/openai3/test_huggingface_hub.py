"""huggingface_hub: InferenceClient with the address of the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

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
GREEDY: Any = {"max_tokens": 24, "temperature": 0, "model": MODEL}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}


@pytest.fixture(scope="module")
def client(server: Serving) -> Any:
    return InferenceClient(base_url=server.v1, api_key=KEY)


async def test_16_at_once_are_the_same_as_alone_and_as_streams(client: Any, server: Serving) -> None:
    questions = [f"Name the capital of {country}." for country in ("France", "Peru", "Japan", "Norway")]
    asynchronous = AsyncInferenceClient(base_url=server.v1, api_key=KEY)

    async def streamed(question: str) -> tuple[str, Any]:
        text, usage = "", None
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        messages = [{"role": "user", "content": question}]
        async for chunk in await asynchronous.chat_completion(messages, **GREEDY, **options):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return text, usage

    alone = [client.chat_completion([{"role": "user", "content": question}], **GREEDY) for question in questions]
    together = await asyncio.gather(*(streamed(question) for question in questions * 4))
    assert [text for text, _ in together] == [answer.choices[0].message.content for answer in alone] * 4
    assert "Paris" in together[0][0]
    for (_, usage), answer in zip(together, alone * 4, strict=True):
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens == answer.usage.total_tokens


def test_a_required_tool_is_called(client: Any) -> None:
    fields = {**GREEDY, "max_tokens": 128, "tools": [WEATHER], "tool_choice": "required"}
    call = client.chat_completion(ASK, **fields).choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    check_weather(json.loads(call.function.arguments))


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER_SCHEMA, "strict": True}},
        {"type": "json_object", "value": WEATHER_SCHEMA},
    ],
    ids=["OpenAI's form", "the form of text-generation-inference"],
)
def test_the_answer_matches_the_schema(client: Any, form: Any) -> None:
    answer = client.chat_completion(ASK, **GREEDY | {"max_tokens": 64}, response_format=form)
    check_weather(json.loads(answer.choices[0].message.content))


def test_log_probabilities_belong_to_the_text(client: Any) -> None:
    choice = client.chat_completion(ASK, logprobs=True, top_logprobs=2, **GREEDY).choices[0]
    assert "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content)


def test_reasoning_is_apart_from_the_answer(reasoning_server: Serving) -> None:
    client = InferenceClient(base_url=reasoning_server.v1, api_key=KEY)
    fields = {**GREEDY, "max_tokens": 64, "extra_body": {"grammar": REASONS_THEN_ANSWERS}}
    message = client.chat_completion(ASK, **fields).choices[0].message
    assert message.content == CONCLUSION
    assert message.reasoning_content.strip() == THOUGHT


def test_the_alias_of_openais_client(client: Any) -> None:
    assert "Paris" in client.chat.completions.create(messages=ASK, **GREEDY).choices[0].message.content


def test_errors_have_the_servers_status_and_message(client: Any, server: Serving) -> None:
    with pytest.raises(HfHubHTTPError, match="401"):
        InferenceClient(base_url=server.v1, api_key="wrong").chat_completion(ASK, **GREEDY)
    with pytest.raises(HfHubHTTPError, match="temperature"):
        client.chat_completion(ASK, **GREEDY | {"temperature": -1})
