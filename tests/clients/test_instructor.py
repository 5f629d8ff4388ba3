"""instructor: structured answers through each of its modes that a server of OpenAI's or Anthropic's API can have."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor.core import IncompleteOutputException
from pydantic import BaseModel, Field

from tests.clients.serving import CITIES, KEY, MODEL, Serving, at_once

ENFORCED = {  # the mode, and what its request demands of the server
    instructor.Mode.TOOLS: "a call of a named function",
    instructor.Mode.TOOLS_STRICT: "the same with strict",
    instructor.Mode.JSON_SCHEMA: "response_format json_schema",
    instructor.Mode.RESPONSES_TOOLS: "a call of a function in /v1/responses",
}


class Forecast(BaseModel):
    """The weather of some days."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=5)


def asked(city: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"The weather in {city} in the next 3 days?"}]
    return {"model": MODEL, "messages": messages, "response_model": Forecast, "max_retries": 1, "temperature": 0}


@pytest.fixture(params=ENFORCED, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> Any:
    return request.param


def client_of(server: Serving, mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0), mode=mode)


def test_16_at_once_fill_the_class_at_the_first_try(mode: Any, server: Serving) -> None:
    client = client_of(server, mode)
    limit = "max_output_tokens" if "responses" in mode.value else "max_tokens"
    forecasts = at_once(lambda city: client.create(**asked(city), **{limit: 96}), list(CITIES) * 4)
    assert all(isinstance(forecast, Forecast) for forecast in forecasts)
    assert len({forecast.city for forecast in forecasts}) > 1


def test_a_partial_object_grows_to_the_whole_one(server: Serving) -> None:
    client = client_of(server, instructor.Mode.JSON_SCHEMA)
    states = list(client.create_partial(**asked("Oslo"), max_tokens=96))
    whole = client.create(**asked("Oslo"), max_tokens=96)
    assert states[-1].model_dump() == whole.model_dump()
    assert all(state.city is None or whole.city.startswith(state.city) for state in states)


def test_json_mode_is_json(server: Serving) -> None:
    client = client_of(server, instructor.Mode.JSON)
    _, completion = client_of(server, instructor.Mode.JSON_SCHEMA).create_with_completion(
        **asked("Oslo"), max_tokens=96
    )
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens

    class Anything(BaseModel):
        model_config = {"extra": "allow"}

    answer = client.create(**asked("Oslo") | {"response_model": Anything}, max_tokens=200)
    assert isinstance(answer, Anything)


def test_anthropics_client_fills_the_class(server: Serving) -> None:
    mode = instructor.Mode.ANTHROPIC_TOOLS  # ANTHROPIC_JSON only asks for JSON in words
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=server.url, api_key=KEY), mode=mode)
    fields = {**asked("Oslo"), "max_tokens": 128}
    del fields["temperature"]  # anthropic 2 has no such argument
    forecast = client.create(**fields, extra_body={"temperature": 0})
    assert isinstance(forecast, Forecast)


async def test_the_asynchronous_client(server: Serving) -> None:
    client = instructor.from_openai(
        openai.AsyncOpenAI(base_url=server.v1, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA
    )
    cities = [item async for item in client.create_iterable(**asked("Oslo") | {"max_retries": 0}, max_tokens=96)]
    assert all(isinstance(item, Forecast) for item in cities)


def test_an_answer_that_is_cut_off_is_marked_as_such(server: Serving) -> None:
    with pytest.raises(IncompleteOutputException):
        client_of(server, instructor.Mode.JSON_SCHEMA).create(**asked("Oslo"), max_tokens=2)
