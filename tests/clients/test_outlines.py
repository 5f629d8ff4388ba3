"""outlines: its models for OpenAI's API (JSON schemas) and for vLLM (regular expressions, grammars, choices)."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, Literal

import openai
import outlines
import pytest
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

from tests.clients.serving import CITIES, KEY, MODEL, QUESTION, Serving, at_once


class Forecast(BaseModel):
    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=5)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.fixture(scope="module", params=["openai", "vllm"])
def model(request: pytest.FixtureRequest, server: Serving) -> Any:
    client = openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)
    return getattr(outlines, f"from_{request.param}")(client, MODEL)


@pytest.fixture(scope="module")
def vllm(server: Serving) -> Any:
    return outlines.from_vllm(openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0), MODEL)


def test_text_and_its_stream_are_the_same(model: Any) -> None:
    whole = model(QUESTION, max_tokens=24, temperature=0)
    assert "Paris" in whole
    assert "".join(model.stream(QUESTION, max_tokens=24, temperature=0)) == whole


def test_16_at_once_fill_a_class(model: Any) -> None:
    answers = at_once(
        lambda city: model(f"The weather in {city}?", Forecast, max_tokens=96, temperature=0), list(CITIES) * 4
    )
    for answer in answers:
        Forecast.model_validate_json(answer)
    assert answers[:4] == answers[4:8]


def test_a_stream_of_json_is_json(model: Any) -> None:
    parts = list(model.stream("The weather in Oslo?", Forecast, max_tokens=96, temperature=0))
    assert parts  # one or several: drafts send many tokens in one part
    assert set(json.loads("".join(parts))) == {"city", "days"}


@pytest.mark.parametrize("seed", range(4))
def test_a_regular_expression_is_kept(vllm: Any, seed: int) -> None:
    text = vllm("A date, please.", Regex(r"20\d\d-(0[1-9]|1[0-2])-[0-3]\d"), max_tokens=32, temperature=1.5, seed=seed)
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])-[0-3]\d", text)


@pytest.mark.parametrize("seed", range(4))
def test_a_choice_is_one_of_those_given(vllm: Any, seed: int) -> None:
    assert vllm("Yes or no?", Literal["yes", "no"], max_tokens=8, temperature=1.5, seed=seed) in ("yes", "no")
    assert vllm("A colour?", Colour, max_tokens=8, temperature=1.5, seed=seed) in ("red", "blue")


@pytest.mark.parametrize("seed", range(4))
def test_a_grammar_is_kept(vllm: Any, seed: int) -> None:
    sums = CFG('start: number ("+" number)~1..3\nnumber: /[1-9][0-9]?/\n')
    text = vllm("A sum, please.", sums, max_tokens=32, temperature=1.5, seed=seed)
    assert re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}", text)


async def test_the_asynchronous_model(server: Serving) -> None:
    model = outlines.from_openai(openai.AsyncOpenAI(base_url=server.v1, api_key=KEY), MODEL)
    assert "Paris" in await model(QUESTION, max_tokens=24, temperature=0)
