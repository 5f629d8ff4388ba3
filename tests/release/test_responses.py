"""OpenAI's responses from the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.integration.test_responses import HELLO, OURS, ask, streamed
from tests.support.batch_files import client_of
from tests.support.narrow import expect
from tests.support.scripted_chat import ChatServer, strictly

Json = dict[str, Any]


class Sum(pydantic.BaseModel):
    """A sum."""

    a: int
    b: int


@pytest.fixture(scope="module")
def real(default_model: Path) -> Iterator[openai.OpenAI]:
    server = ChatServer(default_model)
    yield client_of(server)
    server.stop()


def test_the_default_model_answers_and_streams_the_same(real: openai.OpenAI, default_model: Path) -> None:
    fields: Json = {"model": default_model.stem, "input": "What is 2+2? Answer with a number."}
    response = ask(real, **fields)
    assert "4" in response.output_text
    with real.responses.stream(**{**HELLO, **fields, "max_output_tokens": 40}) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert deltas == stream.get_final_response().output_text
    assert deltas.startswith(response.output_text)


def test_the_default_model_gives_what_the_client_can_parse(real: openai.OpenAI, default_model: Path) -> None:
    fields: Json = {"model": default_model.stem, "input": "Split 7 into two numbers.", "max_output_tokens": 40}
    response = real.responses.parse(**{**HELLO, **fields}, text_format=Sum)
    assert isinstance(response.output_parsed, Sum)
    assert response.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_the_default_model_calls_a_tool(real: openai.OpenAI, default_model: Path, *, stream: bool) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    fields: Json = {
        "model": default_model.stem,
        "input": "How is the weather in Oslo?",
        "tools": [{"type": "function", "name": "weather", "parameters": city, "strict": True}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 60,
    }
    response = streamed(real, **fields) if stream else ask(real, **fields)
    strictly(Response, response.to_dict(), *OURS)
    (item,) = response.output
    call = expect(ResponseFunctionToolCall, item)
    assert (call.type, call.name, response.status) == ("function_call", "weather", "completed")
    assert isinstance(json.loads(call.arguments)["city"], str)
