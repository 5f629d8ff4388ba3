"""A conversation that is longer than the context raises the exception by which each client's users shorten it."""

from __future__ import annotations

from typing import Any

import anthropic
import langchain_anthropic
import langchain_openai
import litellm
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from pydantic import SecretStr

from tests.clients.serving import KEY, MODEL, Serving

LONG: Any = [{"role": "user", "content": "Tell me more about it. " * 1000}]


def test_openai(one_at_a_time: Serving) -> None:
    client = openai.OpenAI(base_url=one_at_a_time.v1, api_key=KEY, max_retries=0)
    for stream in (False, True):
        with pytest.raises(
            openai.BadRequestError, match=r"This model's maximum context length is 2048 tokens"
        ) as refused:
            client.chat.completions.create(model=MODEL, messages=LONG, stream=stream)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=LONG)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_anthropic(one_at_a_time: Serving) -> None:
    client = anthropic.Anthropic(base_url=one_at_a_time.url, api_key=KEY, max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 maximum"):
        client.messages.create(model=MODEL, messages=LONG, max_tokens=5)


def test_langchain_with_openai(one_at_a_time: Serving) -> None:
    model = langchain_openai.ChatOpenAI(
        base_url=one_at_a_time.v1, api_key=SecretStr(KEY), model=MODEL, max_retries=0, stream_usage=False
    )
    with pytest.raises(ContextOverflowError):
        model.invoke(LONG)
    with pytest.raises(ContextOverflowError):
        list(model.stream(LONG))


def test_langchain_with_anthropic(one_at_a_time: Serving) -> None:
    model = langchain_anthropic.ChatAnthropic(
        base_url=one_at_a_time.url, api_key=SecretStr(KEY), model_name=MODEL, max_retries=0
    )
    with pytest.raises(ContextOverflowError):
        model.invoke(LONG)
    with pytest.raises(ContextOverflowError):
        list(model.stream(LONG))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(one_at_a_time: Serving, provider: str, stream: bool) -> None:
    url = one_at_a_time.v1 if provider == "openai" else one_at_a_time.url
    with pytest.raises(litellm.ContextWindowExceededError):
        list(litellm.completion(f"{provider}/{MODEL}", LONG, api_base=url, api_key=KEY, max_retries=0, stream=stream))
