"""The official `ollama` package: each of its methods, and clients that use it: LangChain and LlamaIndex."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import ollama
import pytest
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama
from pydantic import BaseModel, Field

from tests.clients.conftest import serve
from tests.clients.serving import CITIES, KEY, MODEL, QUESTION, WEATHER_SCHEMA, Serving, at_once
from tests.support.media_samples import RED

ASK = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 24}
HEADERS = {"Authorization": f"Bearer {KEY}"}
COUNTRIES = ("France", "Peru", "Japan", "Norway")


class Forecast(BaseModel):
    """The weather of some days."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=5)


def get_weather(city: str, days: int) -> str:
    """The weather in a city.

    Args:
        city: The city.
        days: The number of days.
    """
    return f"{days} days of snow in {city}"


def client_of(server: Serving, key: str = KEY) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"Authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def client(server: Serving) -> ollama.Client:
    return client_of(server)


@pytest.fixture(scope="module")
def folder_server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of a folder, whose models can be changed."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(default_model, folder / "base.gguf")
    yield from serve("--models-dir", folder, "-np", "2", "-c", "2048")


# --- chats ------------------------------------------------------------------------------------------------------------


def test_16_chats_at_once_answer_as_alone_and_as_streams(client: ollama.Client) -> None:
    questions = [[{"role": "user", "content": f"Name the capital of {country}."}] for country in COUNTRIES]

    def whole(messages: Any) -> ollama.ChatResponse:
        return client.chat(MODEL, messages, options=GREEDY)

    def streamed(messages: Any) -> tuple[str, ollama.ChatResponse]:
        parts = list(client.chat(MODEL, messages, options=GREEDY, stream=True))
        return "".join(part.message.content or "" for part in parts), parts[-1]

    alone = [whole(question) for question in questions]
    assert "Paris" in (alone[0].message.content or "")
    for (text, last), expected in zip(at_once(streamed, questions * 4), alone * 4, strict=True):
        assert text == expected.message.content
        assert (last.eval_count, last.prompt_eval_count) == (expected.eval_count, expected.prompt_eval_count)
        assert (last.done, last.done_reason) == (True, expected.done_reason)
        assert 0 < (last.prompt_eval_duration or 0) < (last.total_duration or 0)
    assert alone[0].model == MODEL
    assert datetime.fromisoformat(str(alone[0].created_at).replace("Z", "+00:00")).tzinfo


async def test_the_asynchronous_client_gets_the_same(server: Serving, client: ollama.Client) -> None:
    other = ollama.AsyncClient(host=server.url, headers=HEADERS)
    whole = client.chat(MODEL, ASK, options=GREEDY).message.content
    answers = await asyncio.gather(*(other.chat(MODEL, ASK, options=GREEDY) for _ in range(4)))
    assert {answer.message.content for answer in answers} == {whole}
    parts = [part async for part in await other.chat(MODEL, ASK, options=GREEDY, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole
    assert [model.model for model in (await other.list()).models] == [model.model for model in client.list().models]


def test_a_pydantic_class_is_filled_with_a_schema_and_json_mode_gives_an_object(client: ollama.Client) -> None:
    for city in CITIES:
        ask = [{"role": "user", "content": f"The weather in {city}?"}]
        answer = client.chat(MODEL, ask, format=Forecast.model_json_schema(), options={"num_predict": 128})
        assert Forecast.model_validate_json(answer.message.content or "")
    text = client.generate(MODEL, "Alice is 30.", format=WEATHER_SCHEMA, options={"num_predict": 128}).response
    assert set(json.loads(text)) == {"city", "days"}
    assert client.chat(MODEL, ASK, format="json", options=GREEDY).message.content.lstrip().startswith("{")


def test_a_result_of_a_function_continues_the_conversation(client: ollama.Client) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}}
    messages: Any = [
        {"role": "user", "content": "How will the weather be in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo", 3)},
    ]
    answer = client.chat(MODEL, messages, tools=[get_weather], options={**GREEDY, "num_predict": 120})
    assert answer.message.role == "assistant"
    assert answer.message.content or answer.message.tool_calls
    assert all(call.function.name == "get_weather" for call in answer.message.tool_calls or ())


def test_logprobs_are_typed(client: ollama.Client) -> None:
    answer = client.chat(MODEL, ASK, logprobs=True, top_logprobs=2, options=GREEDY)
    assert answer.logprobs
    assert all(entry.logprob <= 0 and len(entry.top_logprobs or ()) == 2 for entry in answer.logprobs)
    assert "".join(entry.token for entry in answer.logprobs).startswith(answer.message.content or "?")


def test_reasoning_is_apart_from_the_answer(reasoning_server: Serving) -> None:
    client = client_of(reasoning_server)
    assert "thinking" in (client.show(MODEL).capabilities or ())
    for think in (True, "low", None):
        answer = client.chat(MODEL, ASK, think=think, options={"temperature": 0, "num_predict": 60})
        assert answer.message.thinking
        parts = list(client.chat(MODEL, ASK, think=think, stream=True, options={"temperature": 0, "num_predict": 60}))
        assert "".join(part.message.thinking or "" for part in parts) == answer.message.thinking
    assert not client.chat(MODEL, ASK, think=False, options=GREEDY).message.thinking


def test_images_are_bytes_paths_or_base64(seeing_server: Serving, tmp_path: Path) -> None:
    client = client_of(seeing_server)
    (tmp_path / "red.png").write_bytes(RED)
    texts = {
        client.chat(
            "tiny", [{"role": "user", "content": "What?", "images": [image]}], options={**GREEDY, "num_predict": 4}
        ).message.content
        for image in (RED, tmp_path / "red.png")
    }
    assert len(texts) == 1
    assert client.generate("tiny", "What?", images=[RED], options={"temperature": 0, "num_predict": 4}).done


# --- texts and vectors ------------------------------------------------------------------------------------------------


def test_generate_answers_continues_and_completes(client: ollama.Client) -> None:
    answer = client.generate(MODEL, QUESTION, options=GREEDY)
    assert "Paris" in answer.response
    assert answer.response == client.chat(MODEL, ASK, options=GREEDY).message.content
    parts = list(client.generate(MODEL, QUESTION, options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == answer.response
    assert parts[-1].context == answer.context
    more = client.generate(MODEL, "And of Spain?", context=answer.context, options=GREEDY)
    assert list(more.context or ())[: len(answer.context or ())] == answer.context
    assert "four" in client.generate(MODEL, "One, two, three,", raw=True, options=GREEDY).response
    assert client.generate(MODEL, QUESTION, system="Answer in one word.", options=GREEDY).response
    with pytest.raises(ollama.ResponseError, match="fill-in-the-middle"):
        client.generate(MODEL, "def f(", suffix="return", options=GREEDY)


def test_vectors_of_similar_texts_are_close(embedding_server: Serving) -> None:
    client = client_of(embedding_server)
    answer = client.embed(MODEL, ["A cat sleeps.", "A kitten naps.", "Tax law of 1987"], dimensions=64)
    cat, kitten, law = answer.embeddings
    assert len(cat) == 64
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(a * b for a, b in zip(cat, law, strict=True))
    assert client.embeddings(MODEL, "A cat sleeps.").embedding
    long = client.embed(MODEL, "word " * 10_000)
    assert (long.prompt_eval_count or 0) > 100
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed(MODEL, "word " * 10_000, truncate=False)


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_described(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model.startswith(MODEL)
    assert listed.modified_at < datetime.now(timezone.utc)
    assert listed.details.family == "llama"
    shown = client.show(listed.model)
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template
    (running,) = client.ps().models
    assert running.model == listed.model
    assert running.expires_at.year > 2300
    client.generate(MODEL, keep_alive="5m")
    left = client.ps().models[0].expires_at - datetime.now(timezone.utc)
    assert timedelta(seconds=200) < left <= timedelta(minutes=5)
    client.generate(MODEL, keep_alive=-1)
    assert client.ps().models[0].expires_at.year > 2300


def test_a_model_is_created_copied_unloaded_and_deleted(folder_server: Serving) -> None:
    client = client_of(folder_server)
    assert client.create("mario", from_="base", system="You are Mario.", parameters=GREEDY).status == "success"
    assert [step.status for step in client.create("luigi", from_="mario", stream=True)][-1] == "success"
    assert client.copy("luigi", "bowser").status == "success"
    assert {model.model for model in client.list().models} == {"base", "mario", "luigi", "bowser"}
    assert client.chat("bowser", ASK).eval_count <= 24
    assert client.show("mario").parameters
    assert client.generate("mario", keep_alive=0).done_reason == "unload"
    assert client.generate("mario", keep_alive="5m").done_reason == "load"
    for name in ("mario", "luigi", "bowser"):
        assert client.delete(name).status == "success"
    assert [model.model for model in client.list().models] == ["base"]
    assert client.pull("base").status == "success"
    assert [step.status for step in client.pull("base", stream=True)][-1] == "success"


def test_errors_are_the_clients_own(server: Serving, folder_server: Serving) -> None:
    calls: list[tuple[Callable[[], Any], int]] = [
        (lambda: client_of(server, "wrong").list(), 401),
        (lambda: client_of(server).chat(MODEL, ASK, options={"top_p": 7}), 400),
        (lambda: client_of(server).chat(MODEL, ASK, think=True), 400),
        (lambda: client_of(server).push(MODEL), 400),
        (lambda: client_of(folder_server).chat("missing", ASK), 404),
        (lambda: client_of(folder_server).show("missing"), 404),
        (lambda: client_of(folder_server).pull("missing"), 404),
        (lambda: client_of(folder_server).delete("missing"), 404),
        (lambda: client_of(folder_server).copy("missing", "other"), 404),
    ]
    for call, status in calls:
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status, caught.value
    with pytest.raises(ollama.ResponseError):
        list(client_of(folder_server).pull("owner/missing-GGUF", stream=True))  # the hub is out of reach


# --- LangChain and LlamaIndex -----------------------------------------------------------------------------------------


@tool
def weather_of(city: str) -> str:
    """The weather in a city."""
    return f"snow in {city}"


def test_langchain_chats_streams_and_fills_a_class(server: Serving, embedding_server: Serving) -> None:
    common: dict[str, Any] = {"base_url": server.url, "client_kwargs": {"headers": HEADERS}, "temperature": 0}
    chat = ChatOllama(model=MODEL, num_predict=24, **common)
    questions = [f"Name the capital of {country}." for country in COUNTRIES]
    answers = chat.batch(questions)
    assert "Paris" in str(answers[0].content)
    assert "".join(str(chunk.content) for chunk in chat.stream(questions[0])) == answers[0].content
    counts = answers[0].usage_metadata
    assert counts is not None
    assert counts["total_tokens"] == counts["input_tokens"] + counts["output_tokens"]
    filled = ChatOllama(model=MODEL, num_predict=128, **common).with_structured_output(Forecast)
    assert isinstance(filled.invoke("The weather in Oslo?"), Forecast)
    bound = chat.bind_tools([weather_of])
    assert bound.invoke("The weather in Oslo?").type == "ai"
    assert OllamaLLM(model=MODEL, num_predict=8, **common).invoke(QUESTION)
    vectors = OllamaEmbeddings(
        model=MODEL, base_url=embedding_server.url, client_kwargs={"headers": HEADERS}
    ).embed_documents(["a", "b"])
    assert len(vectors) == 2


async def test_llama_index_chats_streams_and_fills_a_class(server: Serving, embedding_server: Serving) -> None:
    llm = Ollama(
        model=MODEL, base_url=server.url, headers=HEADERS, additional_kwargs=GREEDY, context_window=4096,
        request_timeout=60, client=client_of(server), async_client=ollama.AsyncClient(server.url, headers=HEADERS),
    )  # fmt: skip
    questions = [[ChatMessage(f"Name the capital of {country}.")] for country in COUNTRIES]
    alone = [llm.chat(question).message.content for question in questions]
    assert "Paris" in str(alone[0])
    together = await asyncio.gather(*(llm.achat(question) for question in questions))
    assert [answer.message.content for answer in together] == alone
    assert list(llm.stream_chat(questions[0]))[-1].message.content == alone[0]
    assert llm.complete("One, two, three,").text
    llm.additional_kwargs["num_predict"] = 128
    filled = llm.structured_predict(Forecast, PromptTemplate("The weather in {city}?"), city="Oslo")
    assert isinstance(filled, Forecast)
    embed = OllamaEmbedding(model_name=MODEL, base_url=embedding_server.url, client_kwargs={"headers": HEADERS})
    assert len(embed.get_text_embedding_batch(["a", "b"])) == 2
