"""What an engine promises, on a device that llama.cpp treats as a GPU: texts are those of the CPU, and the estimate is
what the device reserves. Weights and cells are F32, so that only near ties may give other texts on a GPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch import BatchInferenceEngine, Completion, MediaPrompt, SamplingParams
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig
from cppbatch.engine.request import GenerationRequest
from cppbatch.llama import Backend
from cppbatch.sizing.buffers import read_buffers
from cppbatch.sizing.estimate import estimate_memory
from tests.support.media_files import image
from tests.support.native_engines import PROMPTS

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
EXACT: dict[str, Any] = {
    "n_ctx": 1024, "n_parallel": 4, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "spec": "off", "sampling": "host",
    "flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32",
}  # fmt: skip
CPU: dict[str, Any] = {"n_gpu_layers": 0, "op_offload": False}  # else a GPU computes large batches even so
KINDS = ("plain", "window", "hybrid", "recurrent", "experts")
LAYOUTS = ("unified", "per-sequence")
SYSTEM = "one for all and all for one, whatever the others say. " * 2


def results(
    model: Path, prompts: Sequence[Any] = PROMPTS, params: SamplingParams = GREEDY, **settings: Any
) -> list[Completion]:
    with BatchInferenceEngine(model, **{**EXACT, **settings}) as engine:
        found = engine.generate(list(prompts), params)
        engine.core.kv.check()
        return found


def assert_same_texts(there: list[Completion], here: list[Completion], largest_tie: float) -> None:
    """`there`: of the device; `here`: of the CPU."""
    for one, other in zip(there, here, strict=True):
        assert len(one.tokens) == len(other.tokens)
        differs = (i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1])
        if (first := next(differs, None)) is not None:
            (_, _, best), (_, _, second) = other.logprobs[first].top
            assert best - second <= largest_tie, (first, one.text, other.text)


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[Completion]]:
    """The results of the CPU."""
    return {kind: results(models[kind], **CPU) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_those_of_the_cpu(
    kind: str,
    layout: str,
    *,
    device: dict[str, Any],
    models: dict[str, Path],
    expected: dict[str, list[Completion]],
    largest_tie: float,
) -> None:
    assert_same_texts(results(models[kind], kv_layout=layout, **device), expected[kind], largest_tie)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_is_computed_once_and_changes_no_text(
    kind: str, device: dict[str, Any], models: dict[str, Path], largest_tie: float
) -> None:
    prompts = [SYSTEM + each for each in ("a", "b", "a", "c")]
    settings: dict[str, Any] = {"n_parallel": 1, "checkpoint_min_step": 16}
    here, there = (results(models[kind], prompts, **settings, **where) for where in (CPU, device))
    assert_same_texts(there, here, largest_tie)
    assert [each.usage.cached_tokens for each in there] == [each.usage.cached_tokens for each in here]
    assert there[2].usage.cached_tokens > 0


@pytest.mark.parametrize("swap_space", [0, 64], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_sequences_that_lose_their_cells_get_the_same_texts(
    kind: str, swap_space: int, device: dict[str, Any], models: dict[str, Path], largest_tie: float
) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=60)
    few: dict[str, Any] = {"n_ctx": 512, "n_parallel": 6, "swap_space": swap_space, "kv_layout": "unified"}
    there = results(models[kind], PROMPTS, params, **few, **device)
    assert_same_texts(there, results(models[kind], PROMPTS, params, n_ctx=4096, **CPU), largest_tie)


@pytest.mark.parametrize("spec", ["suffix", "draft"])
def test_accepted_drafts_change_no_text(
    spec: str, device: dict[str, Any], models: dict[str, Path], largest_tie: float
) -> None:
    prompts = [f"{each} one two three one two three one two three" for each in "abcd"]
    params = msgspec.structs.replace(GREEDY, max_tokens=40)
    drafting: dict[str, Any] = {"spec": spec}
    if spec == "draft":
        drafting["draft_model"] = str(models["echo"])
    there = results(models["echo"], prompts, params, **drafting, **device)
    assert_same_texts(there, results(models["echo"], prompts, params, **CPU), largest_tie)
    assert sum(each.usage.accepted_tokens for each in there) > 0


def test_an_image_gives_the_text_of_the_cpu(
    device: dict[str, Any], models: dict[str, Path], largest_tie: float
) -> None:
    prompts = [MediaPrompt(["What is it? ", image(), "\n"]), "Hello"]
    seeing: dict[str, Any] = {"mmproj": str(models["projector"])}
    here, there = (results(models["plain"], prompts, **seeing, **where) for where in (CPU, device))
    assert_same_texts(there, here, largest_tie)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"top_k": 20}, {"top_k": 0}],
    ids=["greedy", "of the candidates", "of whole rows"],
)
def test_tokens_selected_on_the_device_are_those_selected_on_the_host(
    params: dict[str, Any], device: dict[str, Any], models: dict[str, Path]
) -> None:
    sampled = SamplingParams(seed=1, max_tokens=16, ignore_eos=True, **params)
    on_device, on_host = (
        results(models["plain"], PROMPTS, sampled, sampling=where, **device) for where in ("backend", "host")
    )
    assert [each.tokens for each in on_device] == [each.tokens for each in on_host]


PLACEMENTS: dict[str, dict[str, Any]] = {
    "layers": {"n_gpu_layers": 2},
    "experts": {"cpu_moe": True},
    "experts of layers": {"n_gpu_layers": 3, "n_cpu_moe": 2},
    "feed-forward": {"n_cpu_ffn": 1},
    "cells": {"kv_offload": False},
    "a tensor": {"override_tensor": (r"blk\.1\.attn_q=CPU",)},
}


@pytest.mark.parametrize("settings", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_texts_are_those_of_the_cpu_wherever_parts_of_the_model_are(
    settings: dict[str, Any],
    *,
    device: dict[str, Any],
    models: dict[str, Path],
    expected: dict[str, list[Completion]],
    largest_tie: float,
) -> None:
    kind = "plain" if "n_cpu_ffn" in settings else "experts"
    assert_same_texts(results(models[kind], **settings, **device), expected[kind], largest_tie)


@pytest.mark.parametrize("settings", [{}, {"n_gpu_layers": 2}, {"cpu_moe": True}], ids=str)
def test_the_device_reserves_what_was_estimated(
    settings: dict[str, Any], device: dict[str, Any], models: dict[str, Path]
) -> None:
    config = EngineConfig(
        str(models["experts"]), **{**EXACT, "n_ubatch": 64, "kv_layout": "unified", **settings}, **device
    )
    estimated = estimate_memory([config])
    (gpu,) = estimated.devices
    with Backend.get().lines() as lines, BatchInferenceEngine(config):
        pass
    held = [
        sum(each.n_bytes for each in found if each.buffer_type in (gpu.buffer_types or (gpu.name,)))
        for found in (estimated.footprints[0].buffers, read_buffers(lines))
    ]
    assert held[0] == pytest.approx(held[1], rel=0.1)
    assert held[1] > 0


async def test_a_worker_that_is_killed_is_replaced_and_every_request_continues(
    device: dict[str, Any], models: dict[str, Path], expected: dict[str, list[Completion]], largest_tie: float
) -> None:
    n_events = 0

    async def tokens(engine: EngineProcess, i: int) -> list[int]:
        nonlocal n_events
        found: list[int] = []
        async for event in engine.submit(GenerationRequest(id=str(i), prompt=PROMPTS[i], params=GREEDY)):
            assert event.error is None
            found += event.tokens
            n_events += 1
            if n_events == 8:
                (worker,) = await engine.workers()
                assert worker.pid
                os.kill(worker.pid, signal.SIGKILL)
        return found

    async with EngineProcess(models["plain"], **EXACT, **device) as engine:
        found = await asyncio.gather(*(tokens(engine, i) for i in range(len(PROMPTS))))
        (worker,) = await engine.workers()
        assert worker.restarts == 1
    there = [msgspec.structs.replace(each, tokens=its) for each, its in zip(expected["plain"], found, strict=True)]
    assert_same_texts(there, expected["plain"], largest_tie)
