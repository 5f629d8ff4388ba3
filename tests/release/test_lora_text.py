"""LoRA adapters on the default model, and in a worker process that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cppbatch import GenerationRequest, InvalidRequest, SamplingParams
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.models.synthetic import LlamaShape
from tests.support.lora_files import write_lora
from tests.support.lora_texts import (
    FLOATS,
    GREEDY,
    OF,
    PROMPTS,
    STORY,
    Lora,
    alone,
    chosen,
    make_adapters,
    open_engine,
    texts_apart,
    texts_together,
)


@pytest.mark.nightly  # on a tiny model in each run: tests/integration/test_lora_text.py
def test_on_the_default_model_too(f32_model: Path, tmp_path: Path) -> None:
    shape = LlamaShape(n_layer=30, n_embd=576, n_head=9, n_head_kv=3, n_ff=1536)
    files = {name: write_lora(tmp_path / f"{name}.gguf", shape, seed=i, gain=0.6) for i, name in enumerate("xy")}
    prompts, params = ["Once upon a time", STORY], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    loras: list[Lora] = [{"x": 1}, {"y": 0.5}, {}]
    wanted = [alone(f32_model, files, lora, prompts, params) for lora in loras]
    assert len({str(texts) for texts in wanted}) == len(loras)
    with open_engine(f32_model, files, n_ctx=2048, n_parallel=6, kv_layout="unified") as engine:
        mixed = texts_together(engine, params, prompts * 3, [lora for lora in loras for _ in prompts])
    assert mixed == [text for texts in wanted for text in texts]


@pytest.mark.usefixtures("no_pause")
async def test_a_killed_workers_requests_continue_with_their_adapters(tiny_llama: Path, tmp_path: Path) -> None:
    adapters = make_adapters(tmp_path)
    at_start = chosen(adapters, {"x": 1, "y": 0})
    settings: dict[str, Any] = {"n_ctx": 16384, "n_parallel": 16, **FLOATS, "lora": at_start}
    n_events = 0

    async def one(engine: EngineProcess, i: int) -> str:
        nonlocal n_events
        text = ""
        request = GenerationRequest(id=str(i), prompt=PROMPTS[i], params=GREEDY, lora=OF[i])
        async for event in engine.submit(request):
            text += event.text
            n_events += 1
            if n_events in (20, 120):
                (state,) = await engine.workers()
                if state.pid:
                    os.kill(state.pid, signal.SIGKILL)
        return text

    async with EngineProcess(tiny_llama, **settings) as engine:
        assert [each.name for each in engine.info.adapters] == ["x", "y"]
        assert await asyncio.gather(*(one(engine, i) for i in range(len(PROMPTS)))) == texts_apart(tiny_llama, adapters)
        (state,) = await engine.workers()
        assert state.restarts == 2
        with pytest.raises(InvalidRequest, match="adapter 'z' not found"):
            await anext(engine.submit(GenerationRequest(id="bad", prompt="a", lora={"z": 1})))
