"""A worker whose memory runs out has a smaller successor, by what the backend of its device says or does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig
from cppbatch.engine.request import GenerationEvent, GenerationRequest
from tests.support.failing_runtimes import FEW_CELLS, POISON
from tests.support.native_engines import PROMPTS, SETTINGS

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
WORDS = {
    "cuda": "SIGABRT: CUDA error: out of memory ggml/src/ggml-cuda/ggml-cuda.cu:97: CUDA error; the next worker has",
    "vulkan": "what(): vk::Device::allocateMemory: ErrorOutOfDeviceMemory; the next worker has",
    "metal": "exit code 1: OutOfMemory: llama_decode returned -3: compute failed (error: Insufficient Memory",
    "python": "exit code 1: MemoryError: Unable to allocate 8.00 PiB",
}


@pytest.mark.parametrize("backend", WORDS)
async def test_every_way_to_run_out_is_noticed(
    backend: str, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def halve(failed: EngineConfig, _n: int) -> EngineConfig:
        return msgspec.structs.replace(failed, n_ctx=failed.n_ctx // 2)

    settings: dict[str, Any] = {**SETTINGS, "n_ctx": 2 * FEW_CELLS, "kv_layout": "unified", "spec": "off"}
    runtime = f"tests.support.failing_runtimes:runs_out_in_{backend}"
    async with EngineProcess(tiny_llama, refit=halve, runtime=runtime, **settings) as engine:
        poison = GenerationRequest(
            id="poison", prompt=[5, POISON, 6], params=msgspec.structs.replace(GREEDY, max_tokens=3)
        )
        other = GenerationRequest(id="other", prompt=PROMPTS[0], params=GREEDY)
        events, others = await asyncio.gather(_read(engine, poison), _read(engine, other))
        assert {event.error for event in events} == {None}
        assert sum(len(event.tokens) for event in events) == 3
        assert engine.info.n_ctx == FEW_CELLS
        (state,) = await engine.workers()
    assert state.restarts == 1
    assert WORDS[backend] in caplog.text
    with BatchInferenceEngine(tiny_llama, **settings) as whole:
        assert "".join(event.text for event in others) == whole.generate(PROMPTS[:1], GREEDY)[0].text


async def _read(engine: EngineProcess, request: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in engine.submit(request)]
