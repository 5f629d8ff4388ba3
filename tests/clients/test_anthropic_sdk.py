"""The official `anthropic` package."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from tests.clients.serving import KEY, MODEL, QUESTION, WEATHER_SCHEMA, Serving, at_once, check_weather

ASK: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}  # its create() has no temperature
WEATHER: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": WEATHER_SCHEMA}


class Person(BaseModel):
    name: str
    age: int


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.fixture(scope="module")
def client(server: Serving) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)


def test_16_messages_at_once_answer_as_alone_and_as_streams(client: anthropic.Anthropic) -> None:
    questions = [f"Name the capital of {country}." for country in ("France", "Peru", "Japan", "Norway")]

    def streamed(question: str) -> tuple[str, Any]:
        with client.messages.stream(messages=[{"role": "user", "content": question}], **GREEDY) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == text_of(final)
        return text, final

    def whole(question: str) -> tuple[str, Any]:
        message = client.messages.create(messages=[{"role": "user", "content": question}], **GREEDY)
        return text_of(message), message

    alone = [whole(question) for question in questions]
    assert "Paris" in alone[0][0]
    for (text, message), (expected, other) in zip(at_once(streamed, questions * 4), alone * 4, strict=True):
        assert text == expected
        assert message.stop_reason == other.stop_reason
        assert message.usage.output_tokens == other.usage.output_tokens
        read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert read == other.usage.input_tokens + (other.usage.cache_read_input_tokens or 0)


def test_counted_tokens_are_those_of_the_message(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.").input_tokens
    usage = client.messages.create(messages=ASK, system="Be brief.", **GREEDY).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_forced_tool_is_called_and_its_result_continues_the_conversation(client: anthropic.Anthropic) -> None:
    asked: Any = {"tools": [WEATHER], **GREEDY, "max_tokens": 128}
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    called = client.messages.create(messages=ASK, tool_choice=choice, **asked)
    assert called.stop_reason == "tool_use"
    (call,) = (block for block in called.content if block.type == "tool_use")
    check_weather(call.input)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "snow"}
    history: Any = [*ASK, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=history, tool_choice={"type": "none"}, **asked)
    assert answer.stop_reason != "tool_use"
    assert text_of(answer)


def test_a_streamed_tool_call_has_the_input_of_the_whole_one(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    asked: Any = {"tools": [WEATHER], "tool_choice": choice, **GREEDY, "max_tokens": 128}
    whole = client.messages.create(messages=ASK, **asked)
    with client.messages.stream(messages=ASK, **asked) as stream:
        parts = "".join(event.partial_json for event in stream if event.type == "input_json")
        final = stream.get_final_message()
    assert parts
    (call,) = (block for block in whole.content if block.type == "tool_use")
    (same,) = (block for block in final.content if block.type == "tool_use")
    assert call.input == same.input
    check_weather(call.input)


@pytest.mark.parametrize("thread", [{}, {"thread": False}], ids=["thread", "no thread"])
def test_the_tool_runner_calls_a_function_and_continues_with_the_whole_conversation(
    client: anthropic.Anthropic, thread: Any
) -> None:
    """By default it starts a thread on the server and then sends only new messages; not to this server."""
    asked: list[Any] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "snow"

    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    asking: Any = {**GREEDY, "max_tokens": 128, "messages": ASK, "tool_choice": choice, "max_iterations": 2}
    runner = client.beta.messages.tool_runner(tools=[get_weather], **thread, **asking)
    messages = list(runner)
    assert len(messages) == 2
    read = [each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in messages]
    assert read[1] > read[0]  # the question, the call and its result
    assert asked
    assert all(isinstance(city, str) for city in asked)


def test_a_pydantic_class_is_filled(client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "Alice is 30 years old."}]
    message = client.messages.parse(messages=asked, output_format=Person, **GREEDY | {"max_tokens": 64})
    assert isinstance(message.parsed_output, Person)


def test_a_stop_sequence_ends_the_text(client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "Count from 1 to 9."}, {"role": "assistant", "content": "1, 2, 3,"}]
    message = client.messages.create(messages=asked, stop_sequences=["6"], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "6")
    assert "6" not in text_of(message)


def test_a_stream_that_is_closed_ends_its_request(client: anthropic.Anthropic, server: Serving) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with client.messages.stream(messages=ASK, **asked) as stream:
        next(iter(stream.text_stream))
        assert server.stats()["running"] == 1
    server.wait_idle()


async def test_a_cancelled_task_ends_its_request(server: Serving) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        asked: Any = {"model": MODEL, "max_tokens": 900, "extra_body": {"ignore_eos": True}, "timeout": 60}
        task = asyncio.create_task(client.messages.create(messages=ASK, **asked))
        await asyncio.to_thread(server.wait, lambda stats: stats["running"] == 1)
        task.cancel()
        await asyncio.to_thread(server.wait_idle)
        with pytest.raises(asyncio.CancelledError):
            await task


def test_each_kind_of_error_has_its_own_exception(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(messages=ASK, **GREEDY)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(messages=ASK, **GREEDY | {"extra_body": {"temperature": -1}})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(messages=[{"role": "user", "content": "long " * 20000}], **GREEDY)


def test_a_full_queue_is_a_rate_limit_and_a_retry_gets_through(one_at_a_time: Serving) -> None:
    client = anthropic.Anthropic(base_url=one_at_a_time.url, api_key=KEY, max_retries=0, timeout=60)
    patient = client.with_options(max_retries=8).messages.with_raw_response
    with ThreadPoolExecutor() as pool:
        with one_at_a_time.filled():
            with pytest.raises(anthropic.RateLimitError) as refused:
                client.messages.create(messages=ASK, **GREEDY)
            retried = pool.submit(lambda: patient.create(messages=ASK, **GREEDY))
            time.sleep(0.3)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert retried.result().retries_taken > 0
        assert retried.result().parse().usage.output_tokens
