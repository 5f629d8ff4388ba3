"""A request's greedy text does not depend on the batch it runs in (docs/architecture.md, Invariants)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import llama_cpp
import pytest

from cppbatch import BatchInferenceEngine, Completion, SamplingParams
from cppbatch.config import KvLayout, available_threads
from tests.support.near_ties import TOP_TWO_TIE, gap_where_it_parts

STORY = "The river floods every spring and the people rebuild the bridge. "
PROMPTS = [
    "Hi",
    "The capital of France is",
    "Once upon a time, in a land far away, there lived",
    "def fibonacci(n):\n",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "1, 2, 3, 4,",
    "Water boils at",
    "In 1969, ",
    *("History of the town: " + STORY * n + "Then" for n in range(1, 9)),
]
N_TOKENS = pytest.mark.parametrize("n_tokens", [6, pytest.param(32, marks=pytest.mark.soak)])


@cache
def alone(path: Path, n_tokens: int = 32) -> list[str]:
    """Each prompt in llama-cpp-python's own `Llama` class."""
    llm = llama_cpp.Llama(str(path), n_ctx=2048, n_threads=available_threads(), flash_attn=False, verbose=False)
    return [llm.create_completion(p, max_tokens=n_tokens, temperature=0.0)["choices"][0]["text"] for p in PROMPTS]


def greedy(n_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n_tokens)


def batched(path: Path, layout: KvLayout) -> list[Completion]:
    """All prompts at once in the engine."""
    with open_engine(path, layout) as engine:
        return engine.generate(PROMPTS, greedy(32))


def open_engine(path: Path, layout: KvLayout) -> BatchInferenceEngine:
    return BatchInferenceEngine(path, n_ctx=16384, n_parallel=16, kv_layout=layout, flash_attn="off")


def texts(completions: list[Completion]) -> list[str]:
    return [completion.text for completion in completions]


@N_TOKENS
@pytest.mark.parametrize(
    "layout",
    # Of tiny models in each run: tests/integration/test_engine_native.py.
    ["unified", pytest.param("per-sequence", marks=pytest.mark.nightly)],
)
def test_with_float_weights_16_of_16_texts_batched_equal_alone(
    f16_model: Path, layout: KvLayout, n_tokens: int
) -> None:
    expected = alone(f16_model, n_tokens)
    with open_engine(f16_model, layout) as engine:
        assert texts(engine.generate(PROMPTS, greedy(n_tokens))) == expected
        again = engine.generate(PROMPTS, greedy(n_tokens))  # from the prefix cache
        assert texts(again) == expected
        assert all(2 * result.usage.cached_tokens > result.usage.prompt_tokens for result in again[8:])


@pytest.mark.nightly  # of tiny models in each run: tests/integration/test_deterministic.py
@N_TOKENS
def test_with_deterministic_every_logprob_of_the_default_model_is_the_same_alone_and_in_batches_of_7_and_16(
    default_model: Path, n_tokens: int
) -> None:
    """Also after the prompts were computed in other pieces, or copied: --deterministic is about bits."""
    params = SamplingParams(temperature=0, max_tokens=n_tokens // 2, logprobs=5, ignore_eos=True)
    with BatchInferenceEngine(default_model, n_ctx=16384, n_parallel=16, n_gpu_layers=0, deterministic=True) as engine:

        def logprobs(prompts: list[str]) -> list[list[tuple[int, float]]]:
            results = engine.generate(prompts, params)
            return [[(id, logprob) for each in r.logprobs or () for id, _, logprob in each.top] for r in results]

        expected = [logprobs([prompt])[0] for prompt in PROMPTS]
        assert logprobs(PROMPTS) == expected, "from the prefix cache"
        engine.clear_prefix_cache()
        assert logprobs(PROMPTS) == expected
        engine.clear_prefix_cache()
        assert logprobs(PROMPTS[3:10]) == expected[3:10]


@pytest.mark.soak  # as the next one: a mistake in positions or masks fails with float weights at once
def test_with_the_shipped_weights_16_of_16_are_equal_in_the_per_sequence_layout(default_model: Path) -> None:
    assert texts(batched(default_model, "per-sequence")) == alone(default_model)


@pytest.mark.soak
def test_with_the_shipped_weights_unified_texts_part_only_where_two_tokens_are_nearly_tied(
    default_model: Path,
) -> None:
    for prompt, ours in zip(PROMPTS, batched(default_model, "unified"), strict=True):
        assert gap_where_it_parts(default_model, prompt, ours.tokens) < TOP_TWO_TIE
