"""LangChain: `langchain-openai` (chat completions, responses, completions, embeddings) and `langchain-anthropic`."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.serving import CITIES, CONCLUSION, KEY, MODEL, QUESTION, REASONS_THEN_ANSWERS, THOUGHT, Serving

QUESTIONS = [f"Name the capital of {country}." for country in ("France", "Peru", "Japan", "Norway")] * 4


class Forecast(BaseModel):
    """The weather of some days. Enumerations only: langchain-anthropic takes ranges out of a schema."""

    city: Literal["Paris", "Oslo", "Lima", "Rome"]
    days: Literal[1, 2, 3]


@tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{days} days of snow in {city}"


def chats(server: Serving, **fields: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"model": MODEL, "api_key": KEY, "max_retries": 0, "timeout": 60} | fields
    return {
        "chat completions": ChatOpenAI(
            base_url=server.v1, temperature=0, stream_usage=True, **{"max_tokens": 24} | common
        ),
        "responses": ChatOpenAI(
            base_url=server.v1, temperature=0, use_responses_api=True, **{"max_tokens": 24} | common
        ),
        "messages": ChatAnthropic(base_url=server.url, temperature=0, **{"max_tokens": 24} | common),
    }


APIS = ["chat completions", "responses", "messages"]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_batch_of_16_is_the_same_as_one_by_one(api: str, server: Serving) -> None:
    chat = chats(server)[api]
    alone = [chat.invoke(question).text for question in QUESTIONS[:4]]
    together = chat.batch(QUESTIONS, config={"max_concurrency": 16})
    assert [message.text for message in together] == alone * 4
    assert "Paris" in alone[0]
    for message in together:
        usage = message.usage_metadata
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens"] > 5
        assert 0 < usage["output_tokens"] <= 24


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(api: str, server: Serving) -> None:
    chat = chats(server)[api]
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 1
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert isinstance(total, AIMessageChunk)
    assert total.text == whole.text
    assert total.usage_metadata
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert total.usage_metadata[name] == whole.usage_metadata[name], name


def test_a_forced_tool_is_called_and_its_result_continues_the_conversation(api: str, server: Serving) -> None:
    chat = chats(server, max_tokens=200)[api]
    asked = HumanMessage("How will the weather be in Oslo in the next 3 days?")
    forced = chat.bind_tools([get_weather], tool_choice="get_weather")
    message = forced.invoke([asked])
    (call,) = message.tool_calls[:1]
    assert message.invalid_tool_calls == []
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert "days of snow" in result.content
    answers = [get_weather.invoke(call) for call in message.tool_calls]
    assert chat.invoke([asked, message, *answers]).text
    streamed: Any = None
    for chunk in forced.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [c["args"] for c in streamed.tool_calls] == [c["args"] for c in message.tool_calls]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_pydantic_class_is_filled(api: str, method: str, server: Serving) -> None:
    chat = chats(server, max_tokens=200)[api]
    structured = chat.with_structured_output(Forecast, method=method)
    answers = structured.batch([f"The weather in {city}, please." for city in CITIES], config={"max_concurrency": 16})
    assert all(isinstance(answer, Forecast) for answer in answers)


def test_reasoning_is_apart_from_the_answer(api: str, reasoning_server: Serving) -> None:
    chat = chats(reasoning_server, max_tokens=64)[api]
    fields = {"grammar": REASONS_THEN_ANSWERS}
    answer = chat.invoke(QUESTION, extra_body=fields)
    assert answer.text == CONCLUSION
    if api != "chat completions":  # langchain-openai leaves reasoning out of chat completions
        assert THOUGHT in str(answer.content)
    assert chat.stream(QUESTION, extra_body=fields)
    assert "".join(chunk.text for chunk in chat.stream(QUESTION, extra_body=fields)) == CONCLUSION


def test_log_probabilities_and_a_seed(server: Serving) -> None:
    chat = chats(server)["chat completions"]
    message = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = message.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens).startswith(message.text)
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    drawn = ChatOpenAI(base_url=server.v1, api_key=KEY, model=MODEL, temperature=1.5, seed=3, max_tokens=16)
    assert drawn.invoke(QUESTION).text == drawn.invoke(QUESTION).text


def test_completions_continue_a_text(server: Serving) -> None:
    llm = OpenAI(base_url=server.v1, api_key=KEY, model=MODEL, temperature=0, max_tokens=6, max_retries=0)
    assert "four" in llm.invoke("One, two, three,")
    prompts = [f"{n}, {n + 1}, {n + 2}," for n in range(16)]
    texts = [generations[0].text for generations in llm.generate(prompts).generations]
    assert texts == [llm.invoke(prompt) for prompt in prompts]
    assert "".join(llm.stream(prompts[3])) == texts[3]


def test_embeddings_put_related_texts_near_each_other(embedding_server: Serving) -> None:
    embeddings = OpenAIEmbeddings(
        base_url=embedding_server.v1, api_key=KEY, model=MODEL, check_embedding_ctx_length=False
    )
    cat, kitten, tax = embeddings.embed_documents(
        ["A cat sat on the mat.", "A kitten lies on a rug.", "Tax law of 1987"]
    )
    assert embeddings.embed_query("A cat sat on the mat.") == pytest.approx(cat, abs=1e-5)
    assert sum(map(float.__mul__, cat, kitten)) > sum(map(float.__mul__, cat, tax))


async def test_an_asynchronous_stream_that_is_left_ends_its_request(api: str, server: Serving) -> None:
    fields = {"extra_body": {"ignore_eos": True}}
    async for _ in chats(server, max_tokens=900)[api].astream(QUESTION, **fields):
        assert server.stats()["running"] == 1
        break
    server.wait_idle()


def test_errors_are_the_sdks_own(api: str, server: Serving, one_at_a_time: Serving) -> None:
    refused: Any = (openai.AuthenticationError, anthropic.AuthenticationError)
    with pytest.raises(refused):
        chats(server, api_key="wrong")[api].invoke(QUESTION)
    with one_at_a_time.filled(), pytest.raises((openai.RateLimitError, anthropic.RateLimitError)):
        chats(one_at_a_time)[api].invoke(QUESTION)
    assert chats(one_at_a_time, max_retries=5)[api].invoke(QUESTION).text
