"""The official `openai` package. Run with version 2 and with version 3."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.serving import CITIES, KEY, MODEL, QUESTION, WEATHER_SCHEMA, Serving, at_once, check_weather

ASK: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"model": MODEL, "max_tokens": 24, "temperature": 0}
CALL: Any = {**GREEDY, "max_tokens": 128, "tool_choice": "required", "parallel_tool_calls": False}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER_SCHEMA},
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0, timeout=60)


def test_16_chats_at_once_answer_as_alone_and_as_streams(client: openai.OpenAI) -> None:
    questions = [f"Name the capital of {country}." for country in ("France", "Peru", "Japan", "Norway")]

    def streamed(question: str) -> tuple[str, Any]:
        text, usage = "", None
        messages: Any = [{"role": "user", "content": question}]
        chunks = client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        for chunk in chunks:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return text, usage

    def whole(question: str) -> tuple[str, Any]:
        messages: Any = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(messages=messages, **GREEDY)
        return answer.choices[0].message.content or "", answer.usage

    alone = [whole(question) for question in questions]
    together = at_once(streamed, questions * 4)
    assert "Paris" in alone[0][0]
    for (text, usage), (expected, counted) in zip(together, alone * 4, strict=True):
        assert text == expected
        assert usage.completion_tokens == counted.completion_tokens
        assert usage.prompt_tokens == counted.prompt_tokens
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_required_tool_is_called_and_its_result_continues_the_conversation(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "How will the weather be in Oslo?"}]
    called = client.chat.completions.create(
        messages=asked,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        **GREEDY | {"max_tokens": 128},
    )
    (choice,) = called.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    check_weather(json.loads(call.function.arguments))
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "snow"}'}
    history: Any = [*asked, choice.message.to_dict(), result]
    answer = client.chat.completions.create(messages=history, tools=[WEATHER], tool_choice="none", **GREEDY)
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_a_streamed_tool_call_is_put_together_by_the_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=ASK, tools=[WEATHER], **CALL) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert names == ["get_weather"]
    check_weather(json.loads((message.tool_calls or [])[0].function.arguments))


def test_a_pydantic_class_is_filled(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Alice is 30 years old."}]
    chat = client.chat.completions.parse(messages=messages, response_format=Person, **GREEDY | {"max_tokens": 64})
    assert isinstance(chat.choices[0].message.parsed, Person)
    response = client.responses.parse(
        model=MODEL, input="Alice is 30 years old.", text_format=Person, temperature=0, max_output_tokens=64
    )
    assert isinstance(response.output_parsed, Person)
    assert response.usage
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_streamed_response_has_the_text_of_the_whole_one(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert deltas == final.output_text == whole.output_text
    assert "Paris" in deltas


def test_16_completions_of_one_request_keep_their_order(client: openai.OpenAI) -> None:
    prompts = [f"{n}, {n + 1}, {n + 2}," for n in range(16)]
    asked: Any = {"model": MODEL, "prompt": prompts, "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == list(range(16))
    texts = [""] * 16
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) > 8


def test_log_probabilities_belong_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=3, **GREEDY)
    (choice,) = answer.choices
    content = choice.logprobs and choice.logprobs.content
    assert content
    assert "".join(token.token for token in content).startswith(choice.message.content or "-")
    for token in content:
        best = max(token.top_logprobs, key=lambda other: other.logprob)
        assert (token.token, token.logprob) == (best.token, best.logprob)
        assert token.logprob <= 0


def test_a_stream_that_is_closed_ends_its_request(client: openai.OpenAI, server: Serving) -> None:
    server.wait_idle()
    messages: Any = [{"role": "user", "content": "Tell me a very long story."}]
    stream = client.chat.completions.create(
        messages=messages, stream=True, model=MODEL, max_tokens=900, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.stats()["running"] == 1
    stream.close()
    began = time.monotonic()
    server.wait_idle()
    assert time.monotonic() - began < 2


async def test_a_cancelled_task_ends_its_request(server: Serving) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0) as client:
        task = asyncio.create_task(
            client.completions.create(
                model=MODEL, prompt="Once upon a time", max_tokens=900, extra_body={"ignore_eos": True}
            )
        )
        await asyncio.to_thread(server.wait, lambda stats: stats["running"] == 1)
        task.cancel()
        await asyncio.to_thread(server.wait_idle)
        with pytest.raises(asyncio.CancelledError):
            await task


def test_each_kind_of_error_has_its_own_exception(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as wrong_key:
        client.with_options(api_key="wrong").chat.completions.create(messages=ASK, **GREEDY)
    assert wrong_key.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_0")
    with pytest.raises(openai.BadRequestError) as wrong_value:
        client.chat.completions.create(messages=ASK, **GREEDY | {"temperature": -1})
    assert wrong_value.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=[{"role": "user", "content": "long " * 20000}], **GREEDY)


def test_a_full_queue_is_a_rate_limit_and_a_retry_gets_through(one_at_a_time: Serving) -> None:
    client = openai.OpenAI(base_url=one_at_a_time.v1, api_key=KEY, timeout=60, max_retries=0)
    asked: Any = {"model": MODEL, "prompt": "One,", "max_tokens": 2}
    patient = client.with_options(max_retries=8).completions.with_raw_response
    with ThreadPoolExecutor() as pool:
        with one_at_a_time.filled():
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(**asked)
            retried = pool.submit(lambda: patient.create(**asked))
            time.sleep(0.3)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert retried.result().retries_taken > 0
        assert retried.result().parse().usage


def test_vectors_of_a_text_are_the_same_in_every_form(embedding_server: Serving) -> None:
    client = openai.OpenAI(base_url=embedding_server.v1, api_key=KEY)
    texts = ["A cat sat on the mat.", "A kitten lies on a rug.", "Tax law of 1987"]
    decoded = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for one, other in zip(decoded.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-4)
    cat, kitten, tax = (item.embedding for item in decoded.data)
    near = sum(x * y for x, y in zip(cat, kitten, strict=True))
    assert near > sum(x * y for x, y in zip(cat, tax, strict=True))
    assert decoded.usage.prompt_tokens == decoded.usage.total_tokens > 0


def test_a_batch_file_is_answered_line_by_line(client: openai.OpenAI) -> None:
    lines = [
        {"custom_id": f"q-{n}", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASK, **GREEDY}}
        for n in range(8)
    ]
    wrong = {**lines[0], "custom_id": "wrong", "body": {"messages": ASK, **GREEDY, "temperature": -1}}
    data = "\n".join(json.dumps(line) for line in [*lines, wrong]).encode()
    file = client.files.create(file=("questions.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    end = time.monotonic() + 60
    while batch.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < end, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed, batch.request_counts.total) == (8, 1, 9)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    texts = {a["custom_id"]: a["response"]["body"]["choices"][0]["message"]["content"] for a in answers}
    assert sorted(texts) == sorted(str(line["custom_id"]) for line in lines)
    assert set(texts.values()) == {client.chat.completions.create(messages=ASK, **GREEDY).choices[0].message.content}
    (failed,) = client.files.content(batch.error_file_id or "").text.splitlines()
    assert json.loads(failed)["custom_id"] == "wrong"
    for name in (file.id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(name or "").deleted


def test_the_cities_of_the_schema_are_all_possible(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER_SCHEMA, "strict": True}}

    def about(city: str) -> str:
        messages: Any = [{"role": "user", "content": f"How is the weather in {city}?"}]
        answer = client.chat.completions.create(
            messages=messages, response_format=form, model=MODEL, max_tokens=64, temperature=1, seed=7
        )
        arguments = json.loads(answer.choices[0].message.content or "")
        check_weather(arguments)
        return str(arguments["city"])

    assert len(set(at_once(about, list(CITIES) * 4))) > 1
