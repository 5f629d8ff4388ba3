"""Haystack: chat generators of both of OpenAI's APIs, tools, embedders and a pipeline for retrieval."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import Tool
from haystack.utils import Secret

from tests.clients.serving import (
    CONCLUSION,
    KEY,
    MODEL,
    QUESTION,
    REASONS_THEN_ANSWERS,
    WEATHER_SCHEMA,
    Serving,
    check_weather,
)

ASK = [ChatMessage.from_user(QUESTION)]
GENERATORS: Any = {"chat completions": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}


def generator(server: Serving, api: str, key: str = KEY, n: int = 24, **fields: Any) -> Any:
    limit = {"chat completions": "max_tokens", "responses": "max_output_tokens"}[api]
    return GENERATORS[api](
        api_key=Secret.from_token(key),
        model=MODEL,
        api_base_url=server.v1,
        max_retries=0,
        generation_kwargs={"temperature": 0, limit: n} | fields,
    )


@pytest.fixture(params=GENERATORS)
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_16_at_once_are_the_same_as_alone_and_as_streams(api: str, server: Serving) -> None:
    chat = generator(server, api)
    questions = [ChatMessage.from_user(f"Name the capital of {c}.") for c in ("France", "Peru", "Japan", "Norway")]
    alone = [chat.run([question])["replies"][0] for question in questions]
    together = await asyncio.gather(*(chat.run_async([question]) for question in questions * 4))
    assert [answer["replies"][0].text for answer in together] == [message.text for message in alone] * 4
    assert "Paris" in alone[0].text
    parts: list[str] = []
    streamed = chat.run(ASK, streaming_callback=lambda chunk: parts.append(chunk.content))["replies"][0]
    assert "".join(parts) == streamed.text == chat.run(ASK)["replies"][0].text
    usage = alone[0].meta["usage"]
    read, written = ("prompt_tokens", "completion_tokens") if api != "responses" else ("input_tokens", "output_tokens")
    assert usage["total_tokens"] == usage[read] + usage[written]


def test_a_forced_tool_is_called_and_its_result_continues_the_conversation(api: str, server: Serving) -> None:
    weather = Tool("get_weather", "The weather in a city.", WEATHER_SCHEMA, lambda city, days: f"{days} days of snow")
    chat = generator(server, api, n=128, tool_choice="required", parallel_tool_calls=False)
    message = chat.run(ASK, tools=[weather])["replies"][0]
    check_weather(message.tool_call.arguments)
    streamed = chat.run(ASK, tools=[weather], streaming_callback=lambda chunk: None)["replies"][0]
    assert streamed.tool_call.arguments == message.tool_call.arguments
    result = ChatMessage.from_tool(tool_result=weather.invoke(**message.tool_call.arguments), origin=message.tool_call)
    assert generator(server, api).run([*ASK, message, result])["replies"][0].text


def test_json_that_matches_a_schema(api: str, server: Serving) -> None:
    form = {"type": "json_schema", "name": "weather", "schema": WEATHER_SCHEMA, "strict": True}
    fields: Any = (
        {"text": {"format": form}}
        if api == "responses"
        else {"response_format": {"type": "json_schema", "json_schema": {**form, "type": None} | {}}}
    )
    if api != "responses":
        del fields["response_format"]["json_schema"]["type"]
    import json

    check_weather(json.loads(generator(server, api, n=64, **fields).run(ASK)["replies"][0].text))


def test_reasoning_is_apart_from_the_answer(api: str, reasoning_server: Serving) -> None:
    chat = generator(reasoning_server, api, n=64, extra_body={"grammar": REASONS_THEN_ANSWERS})
    assert chat.run(ASK)["replies"][0].text == CONCLUSION


def test_a_pipeline_finds_the_document_and_asks_with_it(server: Serving, embedding_server: Serving) -> None:
    def embedder(kind: Any) -> Any:
        return kind(api_key=Secret.from_token(KEY), model=MODEL, api_base_url=embedding_server.v1)

    documents = [Document(content="The cat of the mayor is called Zorro."), Document(content="Tax law of 1987")]
    store = InMemoryDocumentStore()
    store.write_documents(embedder(OpenAIDocumentEmbedder).run(documents)["documents"])
    prompt = "{% for d in documents %}{{ d.content }}{% endfor %} What is the name of the cat?"
    pipeline = Pipeline()
    pipeline.add_component("embed", embedder(OpenAITextEmbedder))
    pipeline.add_component("find", InMemoryEmbeddingRetriever(store, top_k=1))
    pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user(prompt)], required_variables="*"))
    pipeline.add_component("chat", generator(server, "chat completions"))
    pipeline.connect("embed.embedding", "find.query_embedding")
    pipeline.connect("find.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "chat.messages")
    answer = pipeline.run({"embed": {"text": "How is the mayor's cat called?"}})
    assert "Zorro" in answer["chat"]["replies"][0].text


def test_errors_are_the_sdks_own(api: str, server: Serving) -> None:
    with pytest.raises(openai.AuthenticationError):
        generator(server, api, key="wrong").run(ASK)
    with pytest.raises(openai.BadRequestError):
        generator(server, api, top_p=7).run(ASK)
