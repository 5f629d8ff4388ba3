"""Pydantic AI: agents over chat completions, responses and messages; tools, structured output, thinking, embeddings."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider

from tests.clients.serving import CONCLUSION, KEY, MODEL, QUESTION, REASONS_THEN_ANSWERS, THOUGHT, Serving

APIS = ["chat completions", "vllm", "responses", "messages"]


class Forecast(BaseModel):
    """The weather of some days."""

    city: Literal["Paris", "Oslo", "Lima", "Rome"]
    days: Literal[1, 2, 3]


def model_of(server: Serving, api: str, key: str = KEY) -> Any:
    if api == "messages":
        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=server.url, api_key=key))
    if api == "vllm":
        return OpenAIChatModel(MODEL, provider=VLLMProvider(base_url=server.v1, api_key=key))
    provider = OpenAIProvider(base_url=server.v1, api_key=key)
    return {"chat completions": OpenAIChatModel, "responses": OpenAIResponsesModel}[api](MODEL, provider=provider)


def agent_of(server: Serving, api: str, key: str = KEY, n: int = 24, settings: Any = None, **fields: Any) -> Any:
    chosen = {"temperature": 0, "max_tokens": n, **(settings or {})}
    return Agent(model_of(server, api, key), model_settings=chosen, **fields)


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_16_at_once_are_the_same_as_alone_and_as_streams(api: str, server: Serving) -> None:
    agent = agent_of(server, api)
    questions = [f"Name the capital of {country}." for country in ("France", "Peru", "Japan", "Norway")]
    alone = [await agent.run(question) for question in questions]
    together = await asyncio.gather(*(agent.run(question) for question in questions * 4))
    assert [answer.output for answer in together] == [answer.output for answer in alone] * 4
    assert "Paris" in alone[0].output
    async with agent.run_stream(QUESTION) as stream:
        parts = [part async for part in stream.stream_text(delta=True, debounce_by=None)]
    whole = await agent.run(QUESTION)
    assert "".join(parts) == whole.output
    streamed, counted = stream.usage, whole.usage
    if callable(streamed):
        streamed, counted = stream.usage(), whole.usage()
    assert (streamed.input_tokens, streamed.output_tokens) == (counted.input_tokens, counted.output_tokens)
    assert counted.total_tokens == counted.input_tokens + counted.output_tokens > 6


async def test_a_forced_tool_is_called_and_its_result_continues_the_conversation(api: str, server: Serving) -> None:
    asked: list[Forecast] = []
    agent = agent_of(server, api, n=200, settings={"parallel_tool_calls": False})

    @agent.tool_plain
    def get_weather(forecast: Forecast) -> str:
        """The weather in a city."""
        asked.append(forecast)
        return "snow"

    def first_a_call_then_text(_: Any) -> Any:
        return {"tool_choice": "none" if asked else ["get_weather"]}

    result = await agent.run(QUESTION, model_settings=first_a_call_then_text)
    assert len(asked) == 1
    assert result.output
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert kinds.index("tool-call") < kinds.index("tool-return") < kinds.index("text")


@pytest.mark.parametrize(
    ("api", "form"), [(api, ToolOutput) for api in APIS] + [(api, NativeOutput) for api in APIS if api != "messages"]
)  # it has native output only for Anthropic's models in its list of names
async def test_a_pydantic_class_is_filled(api: str, form: Any, server: Serving) -> None:
    agent = agent_of(server, api, n=200, output_type=form(Forecast), retries=0)
    answers = await asyncio.gather(*(agent.run(f"The weather in {city}?") for city in ("Oslo", "Lima") * 8))
    assert all(isinstance(answer.output, Forecast) for answer in answers)
    async with agent.run_stream("The weather in Oslo?") as stream:
        assert await stream.get_output() == answers[0].output


async def test_thinking_is_apart_from_the_answer(api: str, reasoning_server: Serving) -> None:
    agent = agent_of(reasoning_server, api, n=64, settings={"extra_body": {"grammar": REASONS_THEN_ANSWERS}})
    answer = await agent.run(QUESTION)
    assert answer.output == CONCLUSION
    (thinking,) = (p for m in answer.all_messages() for p in m.parts if isinstance(p, ThinkingPart))
    # Of a response, `content` is the summary, and the model's own reasoning is in `provider_details`.
    own = "".join((thinking.provider_details or {}).get("raw_content", [])) if api == "responses" else thinking.content
    assert own.strip() == THOUGHT
    again = await agent.run("And of Peru?", message_history=answer.all_messages())
    assert again.output == CONCLUSION


async def test_an_agent_that_is_cancelled_ends_its_request(api: str, server: Serving) -> None:
    agent = agent_of(server, api, n=900, settings={"extra_body": {"ignore_eos": True}})
    task = asyncio.create_task(agent.run(QUESTION))
    await asyncio.to_thread(server.wait, lambda stats: stats["running"] == 1)
    task.cancel()
    await asyncio.to_thread(server.wait_idle)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_have_the_servers_status(api: str, server: Serving, one_at_a_time: Serving) -> None:
    with pytest.raises(ModelHTTPError) as refused:
        await agent_of(server, api, key="wrong").run(QUESTION)
    assert refused.value.status_code == 401
    with pytest.raises(ModelHTTPError) as wrong:
        await agent_of(server, api, settings={"extra_body": {"temperature": -1}}).run(QUESTION)
    assert wrong.value.status_code == 400
    with one_at_a_time.filled(), pytest.raises(ModelHTTPError) as full:
        await agent_of(one_at_a_time, api).run(QUESTION)
    assert full.value.status_code == 429


async def test_embeddings_are_those_of_the_server(embedding_server: Serving) -> None:
    model = OpenAIEmbeddingModel(MODEL, provider=OpenAIProvider(base_url=embedding_server.v1, api_key=KEY))
    texts = ["A cat sat on the mat.", "Tax law of 1987"]
    result = await Embedder(model).embed_documents(texts)
    direct = embedding_server.post("/v1/embeddings", {"input": texts})
    for mine, theirs in zip(result.embeddings, direct["data"], strict=True):
        assert list(mine) == pytest.approx(theirs["embedding"], abs=1e-5)
