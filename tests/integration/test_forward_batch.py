"""`forward_batch`, `generate_grid` and `generate_batch` over real contexts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams, generate_batch
from cppbatch.engine.request import Prompt
from cppbatch.errors import ConfigError, InvalidRequest
from tests.support.fakes import greedy
from tests.support.native_engines import SETTINGS, OpenEngine, assert_everything_is_free

LISTS = [[5], [9, 8, 7, 6, 5, 4], list(range(10, 30)), [300, 301]]  # 29 tokens: a ubatch has 32


@pytest.fixture
def engine(open_engine: OpenEngine, tiny_llama: Path) -> BatchInferenceEngine:
    return open_engine(tiny_llama)


def test_lists_of_different_lengths_are_computed_in_one_pass(engine: BatchInferenceEngine) -> None:
    before = engine.stats().steps
    logits = engine.forward_batch(LISTS)
    assert engine.stats().steps - before == 1
    assert logits.shape == (4, engine.info.n_vocab)
    assert logits.dtype == np.float32
    for tokens, row in zip(LISTS, logits, strict=True):
        (alone,) = engine.forward_batch([tokens])
        (cached,) = engine.forward_batch([tokens], cache_prompt=True)
        np.testing.assert_allclose(row, cached, atol=1e-4)
        np.testing.assert_allclose(row, alone, atol=1e-4)
        (next_token,) = engine.generate([tokens], greedy(1, ignore_eos=False))[0].tokens or [row.argmax()]
        assert row.argmax() == next_token
    assert_everything_is_free(engine)


def test_more_than_a_batch_holds_is_computed_in_several(engine: BatchInferenceEngine) -> None:
    lists = [[7 * i % 200 + 1] * (i + 1) for i in range(40)]  # 820 tokens in ubatches of 32, of 4 sequences
    logits = engine.forward_batch(lists)
    for i in (0, 17, 39):
        np.testing.assert_allclose(logits[i], engine.forward_batch([lists[i]])[0], atol=1e-4)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[1], []], r"token_lists\[1\]"),
        ([[1], [10**6]], r"token_lists\[1\].*token ids are 0 to"),
        ([[1] * 5000], r"token_lists\[0\].*has 5000 tokens.*1024"),
        ([[1], ["a"]], r"token_lists\[1\]"),
    ],
)
def test_lists_that_do_not_fit_are_refused_with_their_size_before_anything_runs(
    lists: list[list[int]], message: str, engine: BatchInferenceEngine
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.forward_batch(lists)
    assert engine.stats().steps == 0


def test_no_lists_have_no_logits(engine: BatchInferenceEngine) -> None:
    assert engine.forward_batch([]).shape == (0, engine.info.n_vocab)


def test_a_grid_is_every_prompt_with_every_setting(engine: BatchInferenceEngine) -> None:
    prompts: list[Prompt] = ["abc", "Hello", [5, 6, 7]]
    settings = [greedy(4, ignore_eos=True), SamplingParams(max_tokens=6, seed=3, ignore_eos=True)]
    grid = engine.generate_grid(prompts, settings)
    assert [[len(each.tokens) for each in row] for row in grid] == [[4, 6]] * 3
    for prompt, row in zip(prompts, grid, strict=True):
        for params, completion in zip(settings, row, strict=True):
            assert completion.text == engine.generate([prompt], params)[0].text
    assert engine.generate_grid([], settings) == []
    assert engine.generate_grid(prompts, []) == [[], [], []]
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]"):
        engine.generate_grid(["abc", ""], settings)
    with pytest.raises(InvalidRequest, match="is a single string"):
        engine.generate_grid("abc", settings)


def test_generate_batch_takes_plain_keywords_and_a_loaded_engine(
    engine: BatchInferenceEngine, tiny_llama: Path
) -> None:
    prompts = ["abc", "Hello"]
    params = SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, seed=42)
    expected = [each.text for each in engine.generate(prompts, params)]
    for model, settings in ((engine, {}), (tiny_llama, SETTINGS)):
        by_keywords = generate_batch(model, prompts, max_tokens=5, temperature=0.7, top_p=0.9, seed=42, **settings)
        assert [each.text for each in by_keywords] == expected
    assert [each.text for each in generate_batch(engine, prompts, params)] == expected
    assert [each.text for each in generate_batch(tiny_llama, prompts, [params] * 2, **SETTINGS)] == expected


def test_generate_batch_refuses_contradictory_arguments(engine: BatchInferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="params: cannot be combined with max_tokens"):
        generate_batch(engine, ["a"], SamplingParams(), max_tokens=5)
    with pytest.raises(ConfigError, match="n_ctx: the engine is already loaded"):
        generate_batch(engine, ["a"], n_ctx=5)
    with pytest.raises(InvalidRequest, match="temperature"):
        generate_batch(engine, ["a"], temperature=-1)


def test_a_loop_over_forward_batch_computes_only_new_tokens_with_the_prompt_cache(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, **SETTINGS) as engine:
        rng = np.random.default_rng(0)
        start = [rng.integers(300, 500, 60).tolist(), rng.integers(300, 500, 70).tolist()]
        computed, texts = [], []
        for cache_prompt in (False, True):
            lists, before = [list(each) for each in start], engine.stats().prompt_tokens
            for _ in range(4):
                for tokens, row in zip(lists, engine.forward_batch(lists, cache_prompt=cache_prompt), strict=True):
                    tokens.append(int(row.argmax()))
            computed.append(engine.stats().prompt_tokens - before)
            texts.append(lists)
    assert texts[0] == texts[1]
    assert computed[0] == 4 * 130 + 2 * (1 + 2 + 3)
    assert computed[1] <= 130 + 2 * 3
