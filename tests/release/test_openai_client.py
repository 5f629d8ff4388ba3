"""OpenAI's own client drives every endpoint of theirs, streamed and not, on the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.support.batch_files import client_of
from tests.support.server_process import ServerProcess

MODEL = "SmolLM2-135M-Instruct"  # whatever its types of weights are on this machine
HELLO: Any = [{"role": "user", "content": "Name the capital of France."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


UNKNOWN_TYPE: Any = {"type": "object", "properties": {"a": {"type": "thing"}}}


@pytest.fixture(scope="module")
def client(default_model: Path) -> Iterator[openai.OpenAI]:
    with ServerProcess("-m", default_model, "--alias", "gpt-4o-mini") as process:
        yield client_of(process.wait_ready())


# --- models ---


def test_the_model_is_listed_by_its_alias(client: openai.OpenAI, default_model: Path) -> None:
    assert [model.id for model in client.models.list()] == ["gpt-4o-mini"]
    assert client.models.retrieve(default_model.stem).id == "gpt-4o-mini"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1"])
def test_its_name_without_the_types_of_weights_means_the_model_too(client: openai.OpenAI, name: str) -> None:
    assert client.models.retrieve(name).id == "gpt-4o-mini"
    assert client.chat.completions.create(model=name, messages=HELLO, max_tokens=2).choices[0].message.content


def test_any_model_name_is_answered_with_the_alias(client: openai.OpenAI) -> None:
    for name in ("gpt-4o-mini", "gpt-9"):
        answer = client.chat.completions.create(model=name, messages=HELLO, max_tokens=2)
        assert answer.model == "gpt-4o-mini"


# --- completions ---


@pytest.mark.parametrize(
    ("prompt", "n_prompts"),
    [("Paris is", 1), (["Paris is", "Rome is"], 2), ([504, 314], 1), ([[504, 314], [504]], 2)],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
def test_every_form_of_prompt_is_continued(client: openai.OpenAI, prompt: Any, n_prompts: int) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == list(range(2 * n_prompts))
    assert answer.usage
    assert answer.usage.completion_tokens <= 8 * n_prompts


def test_a_stream_of_completions_has_the_same_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["One, two,", "A, B,"], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_the_other_fields_of_a_completion_do_what_they_say(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        asked: dict[str, Any] = {
            "model": MODEL,
            "prompt": "One, two, three,",
            "max_tokens": 8,
            "temperature": 0,
            "user": "me",
        } | fields
        answer: str = client.completions.create(**asked).choices[0].text
        return answer

    assert text(echo=True).startswith("One, two, three,")
    assert "five" not in text(stop=["five"])
    # Drafts of the first text would let the second one round differently: BF16 has other kernels for several rows.
    exact: dict[str, Any] = {"temperature": 2, "seed": 5, "extra_body": {"speculate": False}}
    assert text(**exact) == text(**exact)
    assert text(best_of=3, temperature=1)
    four = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=1, temperature=0, logprobs=2)
    assert four.choices[0].logprobs
    assert " four" in text()
    assert " four" not in text(logit_bias={"1876": -100})
    with pytest.raises(openai.BadRequestError, match="not trained for fill-in-the-middle"):
        text(suffix=" five")


# --- chat ---


def test_every_role_and_content_in_parts_is_read(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is the weather "}, {"type": "text", "text": "in Oslo?"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Snow."},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_completion_tokens=16)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage
    assert answer.usage.prompt_tokens > 20


def test_a_message_of_the_assistant_is_continued(client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The capital of France is"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3, temperature=0)
    assert "Paris" in str(answer.choices[0].message.content)


def test_a_streamed_chat_has_the_same_text_and_its_usage(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, last = ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        last = chunk
    assert texts == [choice.message.content for choice in whole.choices]
    assert last
    assert last.usage
    assert last.usage.prompt_tokens_details
    assert last.usage.prompt_tokens_details.cached_tokens is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens if whole.usage else 0


def test_template_variables_are_passed_on(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=4,
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        logprobs=True,
        top_logprobs=3,
        metadata={"unknown": "ignored"},
    )
    assert answer.choices[0].logprobs


def test_a_required_tool_is_called_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "max_tokens": 200, "seed": 3}
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}]
    for choice in choices:
        whole = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        assert whole.choices[0].finish_reason == "tool_calls"
        (call,) = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments["city"] in ("Paris", "Oslo")) == ("get_weather", True)
        name = streamed = ""
        for chunk in client.chat.completions.create(
            **asked, tool_choice=choice, parallel_tool_calls=False, stream=True
        ):
            for piece in chunk.choices[0].delta.tool_calls or []:
                name += (piece.function.name if piece.function else None) or ""
                streamed += (piece.function.arguments if piece.function else None) or ""
        assert (name, json.loads(streamed)) == ("get_weather", arguments)


def test_with_tool_choice_none_no_tool_is_called(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "max_tokens": 8}
    assert client.chat.completions.create(**asked, tool_choice="none").choices[0].message.tool_calls is None


def test_the_clients_own_helper_reads_calls_and_json(client: openai.OpenAI) -> None:
    """`chat.completions.stream` checks every chunk and puts them together."""
    schema: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "n",
            "schema": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}},
        },
    }
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=schema, max_tokens=64, seed=1
    ) as stream:
        text = stream.get_final_completion().choices[0].message.content
    assert isinstance(json.loads(text or ""), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "always"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": UNKNOWN_TYPE}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_a_wrong_field_about_tools_is_named(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, **fields)
    assert refused.value.param == param


# --- embeddings ---


@pytest.fixture(scope="module")
def embedder(stand_in: Path) -> Iterator[openai.OpenAI]:
    with ServerProcess("-m", stand_in, "--pooling", "mean") as process:
        yield client_of(process.wait_ready())


@pytest.mark.parametrize(
    ("given", "n"),
    [("A cat.", 1), (["A cat.", "A dog.", "Tax law"], 3), ([504, 314], 1), ([[504, 314], [504]], 2)],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
def test_every_form_of_input_has_its_vectors(embedder: openai.OpenAI, given: Any, n: int) -> None:
    answer = embedder.embeddings.create(model=MODEL, input=given)  # the client asks for base64 by itself
    assert [item.index for item in answer.data] == list(range(n))
    vectors = np.array([item.embedding for item in answer.data])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    floats = embedder.embeddings.create(model=MODEL, input=given, encoding_format="float")
    # Not bit for bit: float weights round a text that is alone in its step differently than beside others.
    assert np.sum(vectors * [item.embedding for item in floats.data], axis=1) == pytest.approx(1, abs=1e-4)


def test_fewer_dimensions_are_the_first_ones(embedder: openai.OpenAI) -> None:
    whole = np.array(embedder.embeddings.create(model=MODEL, input="A cat.").data[0].embedding)
    short = np.array(embedder.embeddings.create(model=MODEL, input="A cat.", dimensions=16).data[0].embedding)
    assert np.allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-5)
    with pytest.raises(openai.BadRequestError) as refused:
        embedder.embeddings.create(model=MODEL, input="A cat.", dimensions=10_000)
    assert refused.value.param == "dimensions"


def test_a_model_without_text_and_a_model_without_vectors_are_refused_with_the_reason(
    client: openai.OpenAI, embedder: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="--pooling mean"):
        client.embeddings.create(model=MODEL, input="A cat.")
    with pytest.raises(openai.BadRequestError, match="does not generate text"):
        embedder.chat.completions.create(model=MODEL, messages=HELLO)
