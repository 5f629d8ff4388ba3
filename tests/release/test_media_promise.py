"""Images through worker processes: crashes are invisible, and an image that causes them fails alone."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cppbatch import (
    BatchInferenceEngine,
    EngineProcess,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Media,
    MediaPrompt,
    SamplingParams,
)
from tests.support import tiny_projectors
from tests.support.fakes import greedy
from tests.support.listening import until
from tests.support.media_files import encoded, image
from tests.support.submitting import run, together

pytestmark = pytest.mark.usefixtures("no_pause")
SETTINGS: dict[str, Any] = {
    "n_ctx": 2048, "n_parallel": 8, "n_threads": 1, "flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32",
    "spec": "off",
}  # fmt: skip


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_projectors.vision(tmp_path_factory.mktemp("media") / "mmproj.gguf"))


def request(name: object, *parts: str | Media, max_tokens: int = 60) -> GenerationRequest:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    prompt = MediaPrompt(list(parts)) if parts else f"{name} and {name}"
    return GenerationRequest(id=str(name), prompt=prompt, params=params)


def seven() -> list[GenerationRequest]:
    """Five with images, two of them equal, and two texts."""
    pictures = [request(f"p{i}", "See ", image(i % 4), f" number {i}") for i in range(5)]
    return [*pictures, request("a"), request("b")]


def text(events: list[GenerationEvent]) -> str:
    assert events[-1].finish_reason is FinishReason.LENGTH, events[-1].error
    return "".join(event.text for event in events)


async def test_requests_with_images_and_texts_continue_after_a_worker_is_killed(
    tiny_llama: Path, projector: str
) -> None:
    with BatchInferenceEngine(tiny_llama, mmproj=projector, **SETTINGS) as undisturbed:
        results = undisturbed.generate([its.prompt for its in seven()], greedy(200, ignore_eos=True))
    expected = [result.text for result in results]
    async with EngineProcess(tiny_llama, mmproj=projector, **SETTINGS) as engine:
        assert engine.info.modalities == ("image",)
        requests = [
            GenerationRequest(id=its.id, prompt=its.prompt, params=greedy(200, ignore_eos=True)) for its in seven()
        ]
        running = asyncio.ensure_future(together(engine, requests))
        for _ in range(2):
            await asyncio.sleep(0.4)
            await until(lambda: engine._supervisor.worker)
            worker = engine._supervisor.worker
            assert worker
            os.kill(worker._process.pid, signal.SIGKILL)
        assert [text(events) for events in await running] == expected
        assert engine._supervisor.restarts >= 1


async def test_an_image_that_crashes_the_encoder_fails_alone(tiny_llama: Path, projector: str) -> None:
    runtime = "tests.support.failing_runtimes:dies_of_black_pictures"
    black = Media("image", encoded(Image.new("RGB", (8, 8))))
    async with EngineProcess(tiny_llama, runtime=runtime, mmproj=projector, **SETTINGS) as engine:
        *others, poisonous = await together(engine, [*seven(), request("bad", "See ", black, " there")])
        assert poisonous[-1].finish_reason is FinishReason.ERROR
        assert "3 times in a row" in (poisonous[-1].error or "")
        assert all(text(events) for events in others)


async def test_texts_do_not_wait_for_an_encoder_and_a_waiting_image_is_cancelled(
    tiny_llama: Path, projector: str
) -> None:
    """Each of 40 images takes 50 ms here."""
    runtime = "tests.support.failing_runtimes:dies_of_black_pictures"
    async with EngineProcess(tiny_llama, runtime=runtime, mmproj=projector, **SETTINGS) as engine:
        many = [request(f"p{i}", image(100 + i), "x", max_tokens=1) for i in range(40)]
        pictures = [asyncio.ensure_future(run(engine, its)) for its in many]
        await asyncio.sleep(0.2)
        await together(engine, [request(f"t{i}", max_tokens=1) for i in range(4)])
        assert not pictures[-1].done()
        pictures[-2].cancel()
        assert text(await asyncio.wait_for(pictures[-1], 60)) is not None
        assert pictures[-2].cancelled()


@pytest.mark.nightly  # a tiny model in each run: tests/integration/test_media.py
def test_the_default_model_gives_the_same_text_with_images_alone_and_together(f32_model: Path, tmp_path: Path) -> None:
    projector = tiny_projectors.vision(tmp_path / "mmproj.gguf", n_embd=576)
    prompts = [MediaPrompt([f"Picture {i}: ", image(i), "\nThis is"]) for i in range(4)]
    with BatchInferenceEngine(f32_model, mmproj=str(projector), **{**SETTINGS, "n_threads": 0}) as engine:
        alone = [engine.generate([prompt], greedy(6), cache_prompt=False)[0].text for prompt in prompts]
        together = engine.generate(prompts, greedy(6), cache_prompt=False)
    assert [result.text for result in together] == alone
    assert all(result.usage.n_media_tokens == 16 for result in together)
