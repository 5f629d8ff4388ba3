"""A `LocalEngine` whose steps or statistics fail, or that is closed in the middle of a prompt: nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cppbatch import FinishReason, GenerationRequest, LocalEngine, SamplingParams
from cppbatch.engine.core import EngineCore
from cppbatch.errors import EngineClosed
from tests.support.submitting import assert_ends_once, run, together

SETTINGS: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 8, "n_batch": 64, "n_threads": 1, "flash_attn": "off"}


def request(name: str) -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return GenerationRequest(id=name, prompt="Hello", params=params)


async def test_a_failing_step_ends_every_stream_with_an_error_and_the_engine_says_why(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(5))
    step = EngineCore.step

    def failing(self: EngineCore) -> None:
        if next(steps, None) is None:
            raise RuntimeError("boom")
        step(self)

    engine = LocalEngine(tiny_llama, **SETTINGS)
    await engine.loaded()
    monkeypatch.setattr(EngineCore, "step", failing)
    for events in await together(engine, [request(str(i)) for i in range(12)]):
        assert_ends_once(events, FinishReason.ERROR)
        assert "boom" in (events[-1].error or "")
    assert engine.health().status == "failed"
    assert "boom" in (engine.health().error or "")
    with pytest.raises(EngineClosed, match="failed"):
        await run(engine, request("late"))
    await engine.close()
    assert engine.health().status == "failed"


async def test_statistics_that_the_engine_cannot_compute_are_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: EngineCore) -> None:
        raise RuntimeError("boom")

    async with LocalEngine(tiny_llama, **SETTINGS) as engine:
        monkeypatch.setattr(EngineCore, "stats", failing)
        with pytest.raises(EngineClosed, match="failed"):
            await engine.stats()


CLOSE_WHILE_TOKENISING = """
import asyncio, sys
from cppbatch import GenerationRequest, LocalEngine, SamplingParams

async def run(stream):
    async for _ in stream:
        pass

async def main():
    async with LocalEngine(sys.argv[1], n_ctx=2048, n_parallel=1, n_threads=1) as engine:
        busy = SamplingParams(max_tokens=1900, ignore_eos=True)
        running = asyncio.ensure_future(run(engine.submit(GenerationRequest(id="b", prompt="x", params=busy))))
        stream = engine.submit(GenerationRequest(id="a", prompt="hello world " * 300_000))
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
    await asyncio.gather(task, running, return_exceptions=True)

asyncio.run(main())
"""


def test_closing_while_a_long_prompt_is_tokenised_does_not_crash(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", CLOSE_WHILE_TOKENISING, str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
