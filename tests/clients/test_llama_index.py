"""LlamaIndex: OpenAILike for chats and completions, structured answers, function calls, and an index of vectors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from tests.clients.serving import CITIES, KEY, MODEL, QUESTION, Serving


class Forecast(BaseModel):
    """The weather of some days."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=5)


def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{days} days of snow in {city}"


def llm_of(server: Serving, **fields: Any) -> Any:
    common: dict[str, Any] = {
        "model": MODEL,
        "api_base": server.v1,
        "api_key": KEY,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "temperature": 0,
        "max_tokens": 24,
        "max_retries": 0,
    }
    return OpenAILike(**common | fields)


async def test_16_at_once_are_the_same_as_alone_and_as_streams(server: Serving) -> None:
    llm = llm_of(server)
    questions = [[ChatMessage(f"Name the capital of {c}.")] for c in ("France", "Peru", "Japan", "Norway")]
    alone = [llm.chat(question).message.content for question in questions]
    together = await asyncio.gather(*(llm.achat(question) for question in questions * 4))
    assert [answer.message.content for answer in together] == alone * 4
    assert "Paris" in alone[0]
    chunks = list(llm.stream_chat(questions[0]))
    assert "".join(chunk.delta or "" for chunk in chunks) == chunks[-1].message.content == alone[0]
    counts = together[0].additional_kwargs
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]


def test_completions_continue_a_text(server: Serving) -> None:
    llm = llm_of(server, is_chat_model=False)
    whole = llm.complete("One, two, three,").text
    assert "four" in whole
    assert list(llm.stream_complete("One, two, three,"))[-1].text == whole


@pytest.mark.parametrize("forced", [True, False], ids=["schema", "function"])
def test_a_pydantic_class_is_filled(forced: bool, server: Serving) -> None:
    llm = llm_of(server, max_tokens=200, should_use_structured_outputs=forced)
    for city in CITIES:
        answer = llm.structured_predict(Forecast, PromptTemplate("The weather in {city}?"), city=city)
        assert isinstance(answer, Forecast)


def test_a_required_function_is_called(server: Serving) -> None:
    llm = llm_of(server, max_tokens=200)
    asked: Any = {
        "tools": [FunctionTool.from_defaults(get_weather)],
        "user_msg": "The weather in Oslo in the next 3 days?",
        "tool_required": True,
    }
    calls = llm.get_tool_calls_from_response(llm.chat_with_tools(**asked))
    assert {call.tool_name for call in calls} == {"get_weather"}
    assert isinstance(calls[0].tool_kwargs["days"], int)
    *_, last = llm.stream_chat_with_tools(**asked)
    assert [call.tool_kwargs for call in llm.get_tool_calls_from_response(last)] == [c.tool_kwargs for c in calls]
    assert "snow" in str(llm.predict_and_call(**asked))


def test_an_index_finds_the_document_and_answers_with_it(server: Serving, embedding_server: Serving) -> None:
    embed = OpenAILikeEmbedding(model_name=MODEL, api_base=embedding_server.v1, api_key=KEY)
    documents = [Document(text="The cat of the mayor is called Zorro."), Document(text="Tax law of 1987")]
    engine = VectorStoreIndex.from_documents(documents, embed_model=embed).as_query_engine(
        llm=llm_of(server), similarity_top_k=1
    )
    answer = engine.query("How is the mayor's cat called?")
    assert "Zorro" in answer.source_nodes[0].text
    assert "Zorro" in str(answer)


def test_errors_are_the_sdks_own(server: Serving) -> None:
    with pytest.raises(openai.AuthenticationError):
        llm_of(server, api_key="wrong").complete(QUESTION)
    with pytest.raises(openai.BadRequestError):
        llm_of(server, additional_kwargs={"top_p": 7}).complete(QUESTION)
