"""Seeded texts of the default model do not depend on the batch, the order or preemption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.config import KvLayout

N = 16

PROMPTS = [f"{opening} number {i}:" for i, opening in enumerate(["Story", "A list of", "Dear", "The theorem"] * 4)]

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "penalty_last_n": 32},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"typical_p": 0.9},
    {"xtc_probability": 0.5, "dry_multiplier": 0.8},
    {"mirostat": 2},
    {"json_schema": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}}},
]

PARAMS = [SamplingParams(seed=1000 + i, max_tokens=16, **KINDS[i % len(KINDS)]) for i in range(N)]


def open_engine(model: Path, layout: KvLayout = "unified", **settings: Any) -> BatchInferenceEngine:
    sizes = {"n_ctx": 4096, "n_parallel": N, **settings}
    floats: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}
    return BatchInferenceEngine(model, kv_layout=layout, **floats, **sizes)


@pytest.fixture(scope="module")
def alone(f32_model: Path) -> Iterator[list[str]]:
    with open_engine(f32_model) as engine:
        yield [engine.generate([prompt], params)[0].text for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_sixteen_seeded_texts_together_are_those_alone(f32_model: Path, alone: list[str], layout: KvLayout) -> None:
    with open_engine(f32_model, layout) as engine:
        assert [result.text for result in engine.generate(PROMPTS, PARAMS)] == alone


def test_the_order_does_not_matter(f32_model: Path, alone: list[str]) -> None:
    order = [(7 * i + 3) % N for i in range(N)]
    with open_engine(f32_model, n_parallel=5) as engine:
        results = engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    assert [result.text for result in results] == [alone[i] for i in order]


@pytest.mark.parametrize("swap_space", [1024, pytest.param(0, marks=pytest.mark.nightly)])
def test_preemption_does_not_matter(f32_model: Path, alone: list[str], swap_space: int) -> None:
    with open_engine(f32_model, n_ctx=256, swap_space=swap_space) as engine:
        assert [result.text for result in engine.generate(PROMPTS, PARAMS)] == alone
        stats = engine.stats()
    assert (stats.swaps if swap_space else stats.recomputes) > 0
