"""One engine, called in every way by threads and interrupted at any moment: the texts are as alone."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from tests.support.fixtures import shared_engine

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
N = pytest.mark.parametrize("n", [15, pytest.param(50, marks=pytest.mark.soak)])
QUESTIONS = [f"What is {i} + {i + 1}?" for i in range(25)]

engine = shared_engine(n_ctx=4096, n_parallel=8, n_threads=1, cache_type_k="f32", cache_type_v="f32")


def by_generate(engine: BatchInferenceEngine, question: str) -> str:
    return engine.generate([question], PARAMS)[0].text


def by_stream(engine: BatchInferenceEngine, question: str) -> str:
    return "".join(event.text for event in engine.stream(question, PARAMS))


def by_map(engine: BatchInferenceEngine, question: str) -> str:
    return "".join(result.completion.text for result in engine.map([question], PARAMS))


def by_chat(engine: BatchInferenceEngine, question: str) -> str:
    return engine.chat(question, PARAMS).text


def by_chat_stream(engine: BatchInferenceEngine, question: str) -> str:
    return "".join(event.text for event in engine.chat_stream(question, PARAMS))


CONTINUE = [by_generate, by_stream, by_map]
ANSWER = [by_chat, by_chat_stream]
Texts = dict[tuple[str, str], str]


def call(
    engine: BatchInferenceEngine, way: Callable[[BatchInferenceEngine, str], str], question: str, to: Texts
) -> None:
    to["continue" if way in CONTINUE else "answer", question] = way(engine, question)


@pytest.fixture(scope="module")
def alone(engine: BatchInferenceEngine) -> Texts:
    """The texts when nothing else is in the batch."""
    texts: Texts = {}
    for question in QUESTIONS:
        call(engine, by_generate, question, texts)
        call(engine, by_chat, question, texts)
    return texts


@N
def test_8_threads_with_calls_of_all_kinds_get_the_texts_they_get_alone(
    engine: BatchInferenceEngine, alone: Texts, n: int
) -> None:
    def calls(thread: int) -> Texts:
        rng, texts = random.Random(thread), Texts()
        for question in rng.sample(QUESTIONS * 2, n):
            call(engine, rng.choice([*CONTINUE, *ANSWER]), question, texts)
        return texts

    with ThreadPoolExecutor(8) as threads:
        for texts in threads.map(calls, range(8)):
            assert len(texts) >= n // 2
            assert texts == {key: alone[key] for key in texts}
    assert not engine.has_work


@pytest.mark.usefixtures("no_gc_callbacks")
@N
def test_ctrl_c_at_random_moments_of_all_kinds_of_calls_loses_nothing(
    engine: BatchInferenceEngine, alone: Texts, n: int
) -> None:
    rng, seen = random.Random(24), Texts()

    def until_interrupted() -> None:
        while True:
            call(engine, rng.choice([*CONTINUE, *ANSWER]), rng.choice(QUESTIONS), seen)

    for _ in range(n):
        ctrl_c = threading.Timer(rng.uniform(0.001, 0.3), os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  also while the timer starts
            ctrl_c.start()
            until_interrupted()
    assert seen
    assert seen == {key: alone[key] for key in seen}
    assert not engine.has_work
    engine.clear_prefix_cache()
    engine.core.kv.check()
    assert engine.core.kv.n_used == 0
