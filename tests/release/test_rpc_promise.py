"""The promise on the real model: one model over two RPC workers writes the same texts, also if a worker is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.engine.request import GenerationRequest
from tests.support.rpc_workers import RpcWorker

N, N_TOKENS = 16, 12
PROMPTS = [f"Part {i} of the story of the lighthouse:" for i in range(N)]
PARAMS = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
SETTINGS: dict[str, Any] = {"n_ctx": 4096, "n_parallel": N, "spec": "off"}


@pytest.fixture(scope="module")
def expected(f16_model: Path) -> list[str]:
    """The texts of one process."""
    with BatchInferenceEngine(f16_model, **SETTINGS) as engine:
        return [each.text for each in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[RpcWorker, RpcWorker]]:
    with RpcWorker() as one, RpcWorker() as two:
        yield one, two


async def streams(engine: EngineProcess, seen: Callable[[int], object]) -> list[str]:
    n_events = 0

    async def one(i: int) -> str:
        nonlocal n_events
        text = ""
        async for event in engine.submit(GenerationRequest(id=str(i), prompt=PROMPTS[i], params=PARAMS)):
            assert event.error is None
            text += event.text
            n_events += 1
            seen(n_events)
        return text

    return list(await asyncio.gather(*map(one, range(N))))


@pytest.mark.nightly  # of a tiny model in each run: tests/integration/test_rpc.py
async def test_16_of_16_texts_are_those_of_one_process_also_if_a_worker_is_killed(
    workers: tuple[RpcWorker, RpcWorker], expected: list[str], f16_model: Path
) -> None:
    def kill_once(n_events: int) -> None:
        if n_events == N * N_TOKENS // 3:
            workers[1].kill_server()

    rpc = tuple(worker.endpoint for worker in workers)
    async with EngineProcess(f16_model, rpc=rpc, tensor_split=(1, 1), **SETTINGS) as engine:
        assert await streams(engine, lambda n_events: None) == expected
        assert await streams(engine, kill_once) == expected
        (state,) = await engine.workers()
        assert state.restarts == 1
