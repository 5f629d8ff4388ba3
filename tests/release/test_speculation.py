"""Speculative decoding changes no text: with float weights each one is that of an engine without drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, Completion, SamplingParams
from cppbatch.config import KvLayout, Speculation
from tests.support.fakes import know

STORY = (
    "The mill stood by the river, and the river turned its wheel. The miller had a son called Anton, "
    "who was born in 1912 and who left the mill for the town in 1930. "
)
COPY = f"<|im_start|>user\nRepeat this text word for word: {STORY}<|im_end|>\n<|im_start|>assistant\n"
JSON = f'<|im_start|>user\nAnswer in JSON. {STORY}<|im_end|>\n<|im_start|>assistant\n{{"name": "Anton", "born": '
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "born": {"type": "integer"}}}
PLAIN = ["1, 2, 3, 4, 5, 6,", "def add(a, b):\n", "Once upon a time"]
PROMPTS = [COPY, COPY + "The mill", JSON, STORY * 3, *PLAIN, COPY * 2]

GREEDY = {"temperature": 0.0}
SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.4, "seed": 3, "repetition_penalty": 1.1, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "typical_p": 0.9},
    {"temperature": 0.6, "seed": 5, "min_p": 0.1, "frequency_penalty": 0.4},
    {"temperature": 0.0, "stop": (" town",)},
    {"temperature": 0.0, "json_schema": SCHEMA},
    {"temperature": 0.5, "seed": 6, "dry_multiplier": 0.8},
]


def results(
    model: Path, spec: Speculation, layout: KvLayout, *, n_ctx: int = 8192, greedy: bool, n_prompts: int = len(PROMPTS)
) -> tuple[list[Completion], BatchInferenceEngine]:
    """16 requests, or fewer: each prompt twice, once without drafts and with a longer text, because few drafts are
    worth it for sequences that end together. All drafts are computed, whatever rows cost here."""
    params = [
        SamplingParams(max_tokens=32 if speculate else 70, speculate=speculate, **(GREEDY if greedy else SAMPLERS[i]))
        for speculate in (True, False)
        for i in range(n_prompts)
    ]
    with BatchInferenceEngine(model, n_ctx=n_ctx, n_parallel=16, kv_layout=layout, spec=spec, draft_max=4) as engine:
        know(engine, {1: 0.010, 256: 0.011})
        return engine.generate(PROMPTS[:n_prompts] * 2, params), engine


@cache
def without_drafts(model: Path, layout: KvLayout, *, greedy: bool, n_prompts: int = len(PROMPTS)) -> list[Completion]:
    completions, engine = results(model, "off", layout, greedy=greedy, n_prompts=n_prompts)
    assert engine.stats().drafted_tokens == 0
    return completions


@pytest.mark.parametrize(
    ("layout", "greedy"),
    [
        # In each run with preemptions, too: the next test.
        pytest.param("unified", True, id="unified-greedy", marks=pytest.mark.nightly),
        # Of tiny models in each run: tests/integration/test_rollback.py.
        pytest.param("per-sequence", False, id="per-sequence-sampled", marks=pytest.mark.nightly),
        pytest.param("unified", False, id="unified-sampled", marks=pytest.mark.soak),
        pytest.param("per-sequence", True, id="per-sequence-greedy", marks=pytest.mark.soak),
    ],
)
def test_with_float_weights_16_of_16_texts_are_those_without_drafts(
    f16_model: Path, layout: KvLayout, greedy: bool
) -> None:
    without = without_drafts(f16_model, layout, greedy=greedy)
    with_drafts, engine = results(f16_model, "auto", layout, greedy=greedy)
    assert [result.tokens for result in with_drafts] == [result.tokens for result in without]
    assert [result.text for result in with_drafts] == [result.text for result in without]
    assert engine.stats().accepted_tokens > 20
    assert sum(result.usage.accepted_tokens for result in with_drafts[:8]) == engine.stats().accepted_tokens
    assert all(result.usage.drafted_tokens == 0 for result in with_drafts[8:])


@pytest.mark.parametrize(("n_prompts", "n_ctx"), [(3, 256), pytest.param(8, 384, marks=pytest.mark.nightly)])
def test_texts_stay_the_same_if_sequences_are_preempted_between_drafts(
    f16_model: Path, n_prompts: int, n_ctx: int
) -> None:
    without = without_drafts(f16_model, "unified", greedy=True, n_prompts=n_prompts)
    with_drafts, engine = results(f16_model, "auto", "unified", n_ctx=n_ctx, greedy=True, n_prompts=n_prompts)
    stats = engine.stats()
    assert stats.swaps > 0
    assert stats.accepted_tokens > 20
    assert [result.tokens for result in with_drafts] == [result.tokens for result in without]
