"""LangChain, LlamaIndex, Outlines, Instructor and Haystack over `cppbatch.Llama`, by `cppbatch.patch()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

import cppbatch

ANSWERS = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo", "Norway": "Oslo"}
QUESTIONS = [f"Name the capital of {country}." for country in ANSWERS] * 4
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
Capital = Literal["Paris", "Lima", "Tokyo", "Oslo"]
Ask = Callable[[str], str]


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with cppbatch.patch():
        yield


def langchain(model: str) -> tuple[Any, Ask]:
    from langchain_community.llms import LlamaCpp

    # Its own default of rope_freq_base is that of the first Llama models.
    llm = LlamaCpp(
        model_path=model, n_ctx=1024, max_tokens=24, temperature=0, verbose=False, n_threads=1,
        rope_freq_base=0, rope_freq_scale=0,
    )  # fmt: skip
    return llm.client, lambda question: str(llm.invoke(CHATML.format(question)))


def langchain_chat(model: str) -> tuple[Any, Ask]:
    from langchain_community.chat_models import ChatLlamaCpp

    llm = ChatLlamaCpp(
        model_path=model, n_ctx=1024, max_tokens=24, temperature=0, verbose=False, n_threads=1,
        rope_freq_base=0, rope_freq_scale=0,
    )  # fmt: skip
    return llm.client, lambda question: str(llm.invoke(question).content)


def llama_index(model: str) -> tuple[Any, Ask]:
    from llama_index.llms.llama_cpp import LlamaCPP

    llm = LlamaCPP(
        model_path=model, context_window=1024, max_new_tokens=24, temperature=0, verbose=False,
        model_kwargs={"n_threads": 1},
    )  # fmt: skip
    return llm._model, lambda question: str(llm.complete(CHATML.format(question)).text)


def outlines(model: str) -> tuple[Any, Ask]:
    import llama_cpp
    import outlines

    llm = llama_cpp.Llama(model, n_ctx=1024, n_threads=1, verbose=False)
    ask = outlines.from_llamacpp(llm)
    return llm, lambda question: str(ask(question, Capital, max_tokens=8, temperature=0))


def instructor(model: str) -> tuple[Any, Ask]:
    import instructor
    import llama_cpp
    from pydantic import BaseModel

    class City(BaseModel):
        name: Capital

    llm = llama_cpp.Llama(model, n_ctx=1024, n_threads=1, verbose=False)
    create: Any = instructor.patch(create=llm.create_chat_completion_openai_v1, mode=instructor.Mode.JSON_SCHEMA)

    def ask(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return str(create(messages=messages, response_model=City, temperature=0, max_tokens=64).name)

    return llm, ask


def haystack(model: str) -> tuple[Any, Ask]:
    from haystack.dataclasses import ChatMessage
    from haystack_integrations.components.generators.llama_cpp import LlamaCppChatGenerator

    generator = LlamaCppChatGenerator(model=model, n_ctx=1024, model_kwargs={"n_threads": 1})
    generator.warm_up()

    def ask(question: str) -> str:
        given = {"max_tokens": 24, "temperature": 0}
        return str(generator.run([ChatMessage.from_user(question)], generation_kwargs=given)["replies"][0].text)

    return generator._model, ask


@pytest.mark.parametrize("library", [langchain, langchain_chat, llama_index, outlines, instructor, haystack])
def test_sixteen_threads_get_the_answers_of_one_in_fewer_steps(
    library: Callable[[str], tuple[Any, Ask]], default_model: Path
) -> None:
    llm, ask = library(str(default_model))
    assert isinstance(llm, cppbatch.Llama)
    alone = [ask(question) for question in QUESTIONS[:4]]
    n_alone = llm.engine.stats().steps
    assert ANSWERS["France"] in alone[0]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, QUESTIONS))
    assert together == alone * 4
    assert llm.engine.stats().steps - n_alone < n_alone, "16 answers in fewer steps than 4, one after the other"
    llm.close()
