"""Embedding requests through `EngineClient`: on a thread, and in a worker process that may die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, FinishReason, GenerationEvent, GenerationRequest, LocalEngine
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.engine.embeddings import vector_of
from cppbatch.engine.request import Pair, Prompt
from cppbatch.errors import InvalidRequest
from tests.support import submitting
from tests.support.failing_runtimes import POISON
from tests.support.fixtures import engine_of

SETTINGS: dict[str, Any] = {
    "n_ctx": 1024, "n_batch": 1024, "n_parallel": 16, "n_threads": 1, "flash_attn": "off", "cache_type_k": "f32",
    "cache_type_v": "f32", "pooling": "last",
}  # fmt: skip
TEXTS = [f"{i} {'and the cat ' * (60 if i % 20 == 19 else i % 12)}" for i in range(100)]

Engine = LocalEngine | EngineProcess

engine = engine_of(LocalEngine, EngineProcess, **SETTINGS)


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[bytes]:
    with BatchInferenceEngine(tiny_llama, **SETTINGS) as engine:
        return [vector.tobytes() for vector in engine.embed(TEXTS, normalise=False)]


def wanted(name: object, prompt: Prompt, **options: Any) -> GenerationRequest:
    return GenerationRequest(id=str(name), prompt=prompt, task="embed", **options)


async def run(engine: Engine, its: GenerationRequest) -> GenerationEvent:
    """Its one event."""
    (event,) = await submitting.run(engine, its)
    assert event.request_id == its.id
    return event


async def together(engine: Engine, requests: list[GenerationRequest]) -> list[GenerationEvent]:
    return [event for (event,) in await submitting.together(engine, requests)]


def same(events: list[GenerationEvent], expected: list[bytes]) -> bool:
    assert all(event.finish_reason is FinishReason.STOP and event.embedding for event in events)
    vectors = [vector_of(event.embedding or b"") for event in events]
    return bool(np.allclose(np.stack(vectors), np.stack([vector_of(its) for its in expected]), rtol=0, atol=1e-5))


async def test_a_hundred_texts_each_get_their_vector(engine: Engine, expected: list[bytes]) -> None:
    events = await together(engine, [wanted(i, text) for i, text in enumerate(TEXTS)])
    assert same(events, expected)
    stats = await engine.stats()
    assert stats.prompt_tokens == sum(event.usage.prompt_tokens for event in events if event.usage)
    assert (stats.finished, stats.running, stats.kv_cells_used) == ({"stop": 100}, 0, 0)
    assert (engine.info.pooling, engine.info.n_embd) == ("last", len(expected[0]) // 4)


async def test_requests_that_cannot_run_are_refused_alone(engine: Engine, expected: list[bytes]) -> None:
    bad = [
        (wanted("long", [5] * 1025), "has 1025 tokens.*holds only 1024"),
        (wanted("pair", Pair("a", "b")), "is a pair of texts"),
        (GenerationRequest(id="text", prompt="write"), "does not generate text"),
    ]
    good = asyncio.ensure_future(together(engine, [wanted(i, text) for i, text in enumerate(TEXTS[:20])]))
    for its, why in bad:
        with pytest.raises(InvalidRequest, match=why):
            await run(engine, its)
        with pytest.raises(InvalidRequest, match=why):
            await engine.check(its)
    assert same(await good, expected[:20])


async def test_one_that_is_cancelled_or_out_of_time_ends_without_a_vector(
    engine: Engine, expected: list[bytes]
) -> None:
    full = [wanted(f"full{i}", [5 + i] * 1024, priority=-1) for i in range(12)]  # a step each
    busy = [asyncio.ensure_future(run(engine, its)) for its in full]
    late = asyncio.ensure_future(run(engine, wanted("late", "a text", timeout=0.001)))
    gone = asyncio.ensure_future(run(engine, wanted("gone", "a text", priority=100)))
    await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
    await engine.cancel("gone")
    ends = [await asyncio.wait_for(task, 30) for task in (late, gone)]
    assert [event.finish_reason for event in ends] == [FinishReason.TIMEOUT, FinishReason.CANCELLED]
    assert [event.embedding for event in ends] == [None, None]
    assert all([(await task).embedding for task in busy])
    assert same([await run(engine, wanted("next", TEXTS[3]))], expected[3:4])


async def test_pairs_of_texts_reach_a_reranker_in_its_worker(tiny_reranker: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "pooling": None}
    pairs = [Pair("what is a cat", text) for text in ("an animal", "a rate of interest")]
    with BatchInferenceEngine(tiny_reranker, **settings) as local:
        scores = local.embed(pairs)
    async with EngineProcess(tiny_reranker, **settings) as engine:
        assert (engine.info.pooling, engine.info.n_embd) == ("rank", 1)
        events = await together(engine, [wanted(i, pair) for i, pair in enumerate(pairs)])
    assert np.allclose([vector_of(event.embedding or b"") for event in events], scores, atol=5e-4)


@pytest.mark.usefixtures("no_pause")
async def test_a_worker_that_is_killed_loses_no_request(tiny_llama: Path, expected: list[bytes]) -> None:
    async with EngineProcess(tiny_llama, **SETTINGS) as engine:
        n_told = 0

        async def one(its: GenerationRequest) -> GenerationEvent:
            nonlocal n_told
            event = await run(engine, its)
            n_told += 1
            if n_told in (5, 60):
                (state,) = await engine.workers()
                os.kill(state.pid or 0, signal.SIGKILL)
            return event

        requests = [wanted(i, text) for i, text in enumerate(TEXTS)]
        events = await asyncio.wait_for(asyncio.gather(*map(one, requests)), 120)
        assert same(events, expected)
        await asyncio.wait_for(run(engine, wanted("after", "all")), 30)
        (state,) = await engine.workers()
        assert state.restarts >= 1


@pytest.mark.usefixtures("no_pause")
async def test_a_text_that_kills_workers_fails_alone(tiny_llama: Path, expected: list[bytes]) -> None:
    async with EngineProcess(tiny_llama, runtime="tests.support.failing_runtimes:aborts", **SETTINGS) as engine:
        requests = [wanted(i, text) for i, text in enumerate(TEXTS[:30])]
        *others, poisonous = await together(engine, [*requests, wanted("bad", [5, POISON, 7], priority=-5)])
        assert same(others, expected[:30])
        assert poisonous.finish_reason is FinishReason.ERROR
        assert "3 times in a row" in (poisonous.error or "")


def test_paraphrases_are_closer_than_other_sentences(default_model: Path) -> None:
    with BatchInferenceEngine(default_model, n_ctx=512, pooling="mean") as engine:
        a, b, other = engine.embed(
            ["The cat is sleeping on the sofa.", "A cat sleeps on the couch.", "Interest rates rose by half a percent."]
        )
    assert a @ b > 1.02 * max(a @ other, b @ other)
