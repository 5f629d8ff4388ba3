"""Sharing prefixes on real llama.cpp contexts: what each kind of model allows, and that texts stay the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.config import KvLayout, Sharing
from cppbatch.engine.kv import save_cost
from cppbatch.llama import Batch, Context, Model, probe_prefix_sharing
from tests.support import tiny_models
from tests.support.native_engines import OpenEngine

KINDS: list[tuple[str, str, Sharing]] = [
    ("tiny_llama", "unified", "cells"),
    ("tiny_llama", "per-sequence", "copy"),
    ("tiny_mamba", "unified", "whole"),
    ("tiny_swa", "unified", "checkpoints"),
    ("tiny_swa", "per-sequence", "checkpoints"),
    ("tiny_hybrid", "unified", "checkpoints"),
    ("tiny_hybrid", "per-sequence", "checkpoints"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}  # rounding in f16 flips near-tied tokens
STORY = [1, *(300 + i * 7 % 60 for i in range(90))]


@pytest.fixture(params=KINDS, ids=[f"{model}-{layout}" for model, layout, _ in KINDS])
def kind(request: pytest.FixtureRequest) -> tuple[Path, KvLayout, Sharing]:
    model, layout, sharing = request.param
    return request.getfixturevalue(model), layout, sharing


@pytest.fixture
def open_kind(kind: tuple[Path, KvLayout, Sharing], open_engine: OpenEngine) -> OpenEngine:
    """Opens engines over the kind's model."""
    path, layout, _ = kind
    return partial(open_engine, path, kv_layout=layout, n_ctx=2048)


def tokens_of(engine: BatchInferenceEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [completion.tokens for completion in engine.generate(prompts, GREEDY)]


def test_each_kind_of_model_shares_as_far_as_its_memory_allows(kind: tuple[Path, KvLayout, Sharing]) -> None:
    path, layout, sharing = kind
    with Model(path) as model:
        context = Context(model, n_ctx=1024, n_seq_max=4, n_threads=1, kv_unified=layout == "unified")
        assert probe_prefix_sharing(context) == sharing
        assert [context.last_position(i) for i in range(context.n_seq_ids)] == [-1] * context.n_seq_ids


@pytest.mark.parametrize("broken", ["copy", "restore_sequence"])
def test_a_memory_that_does_not_do_what_it_should_shares_nothing(
    tiny_llama: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown kind of memory: sharing seems to work there, but gives another text."""
    with Model(tiny_llama) as model:
        context = Context(model, n_ctx=1024, n_seq_max=4, n_threads=1, kv_unified=broken == "copy")

        def scramble(*_: object) -> None:
            batch_of_nonsense(context)

        monkeypatch.setattr(context, broken, scramble)
        assert probe_prefix_sharing(context) == ("whole" if broken == "copy" else "none")


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_swa", "tiny_mamba"])
def test_kernels_that_round_by_the_number_of_rows_do_not_prevent_sharing(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 270M in Q4_K_M on a CPU with AVX2: eight rows in one batch, or five and three, change logits by 15% of
    their range."""
    decode, logits = Context.decode, Context.logits
    rows: list[int] = []

    def record(context: Context, batch: Batch) -> None:
        rows.append(batch.n_tokens)
        decode(context, batch)

    def rounded(context: Context, n_outputs: int) -> Any:
        exact = logits(context, n_outputs)
        return exact + np.random.default_rng(rows[-1]).uniform(-0.5, 0.5, exact.shape) * np.ptp(exact)

    monkeypatch.setattr(Context, "decode", record)
    monkeypatch.setattr(Context, "logits", rounded)
    with Model(request.getfixturevalue(model)) as opened:
        context = Context(opened, n_ctx=1024, n_seq_max=4, n_threads=1, kv_unified=False)
        assert (
            probe_prefix_sharing(context)
            == {"tiny_llama": "copy", "tiny_swa": "checkpoints", "tiny_mamba": "whole"}[model]
        )


def batch_of_nonsense(context: Context) -> None:
    batch = Batch(8)
    batch.add_run(np.full(5, 400, np.int32), 0, 3, n_logits=0)
    context.remove(3)
    context.decode(batch)


def test_with_one_sequence_at_a_time_and_very_few_cells_texts_are_right(kind: tuple[Path, KvLayout, Sharing]) -> None:
    path, layout, _ = kind
    with BatchInferenceEngine(path, n_ctx=256, n_parallel=1, n_threads=1, kv_layout=layout, flash_attn="off") as engine:
        first = tokens_of(engine, [STORY])
        assert tokens_of(engine, [STORY]) == first
        engine.core.kv.check()


def test_prompts_with_a_common_prefix_get_the_texts_they_get_without_a_cache(open_kind: OpenEngine) -> None:
    prompts = [STORY[:n] + [200 + i] * 3 for i, n in enumerate((91, 91, 60, 40, 91, 13, 60, 91))] + [STORY, STORY]
    expected = tokens_of(open_kind(prefix_cache=False), prompts)
    engine = open_kind()
    for _ in range(2):
        assert tokens_of(engine, prompts) == expected
        engine.core.kv.check()
    assert engine.stats().prefix_hits > 0


def test_one_prompt_with_many_settings_is_read_once(open_kind: OpenEngine) -> None:
    params = [SamplingParams(temperature=1, top_k=8, seed=i, max_tokens=16, ignore_eos=True) for i in range(4)]
    expected = open_kind(prefix_cache=False).generate([STORY] * 4, params)
    engine = open_kind()
    results = engine.generate([STORY] * 4, params)
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    assert len({tuple(r.tokens) for r in results}) == 4
    assert engine.stats().prefix_hit_tokens == 3 * (len(STORY) - 1)


def test_a_conversation_computes_only_its_new_tokens(open_kind: OpenEngine) -> None:
    plain, engine = open_kind(prefix_cache=False), open_kind()
    conversation = STORY[:50]
    for turn in range(4):
        (expected,), (answer,) = plain.generate([conversation], GREEDY), engine.generate([conversation], GREEDY)
        assert answer.tokens == expected.tokens
        if turn:
            assert answer.usage.cached_tokens >= len(conversation) - 5
        conversation = [*conversation, *answer.tokens[:-1], 350 + turn, 360, 370]


@pytest.mark.each_value
@pytest.mark.parametrize("ram", [64, 0], ids=["host memory", "no host memory"])
def test_an_evicted_prefix_is_restored_from_host_memory(
    open_kind: OpenEngine, ram: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_cost, "_NEGLIGIBLE_S", 9.0)  # these models compute as fast as they are saved
    conversations = [[1, *[300 + i] * 60] for i in range(6)]
    plain = open_kind(prefix_cache=False, **EXACT)
    engine = open_kind(n_ctx=512, n_parallel=2, prefix_cache_ram=ram, **EXACT)
    for _ in range(3):
        expected = tokens_of(plain, conversations)
        assert tokens_of(engine, conversations) == expected
        conversations = [c + t[:-1] + [310] for c, t in zip(conversations, expected, strict=True)]
        engine.core.kv.check()
    stats = engine.stats()
    assert (stats.prefix_cache_bytes > 0) == (ram > 0)
    if ram:
        assert stats.prefix_hits == 12


def test_a_tiny_cache_with_shared_prefixes_gives_the_texts_of_a_large_one(open_kind: OpenEngine) -> None:
    prompts = [[*STORY[:n], 200 + i] for i, n in enumerate((30, 91, 60, 91, 10, 91, 60, 30))]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    ample, tiny = open_kind(prefix_cache=False, n_ctx=4096), open_kind(n_ctx=1024)
    expected = [result.tokens for result in ample.generate(prompts, params)]
    assert [result.tokens for result in tiny.generate(prompts, params)] == expected


def test_a_long_window_is_never_shared_beyond_the_cells_of_all_windows(
    tmp_path: Path, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence has its own cells in the window: sharing the other cells admits more than fit there."""
    monkeypatch.setattr(tiny_models, "WINDOW", 1024)
    path = tiny_models.sliding_window(tmp_path / "window.gguf")
    prompts = [[*STORY[:60], 400 + i] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    plain = open_engine(path, kv_layout="unified", n_ctx=1024, prefix_cache=False, **EXACT)
    expected = [completion.tokens for completion in plain.generate(prompts, params)]
    completions = open_engine(path, kv_layout="unified", n_ctx=256, prefix_cache_ram=0, **EXACT).generate(
        prompts, params
    )
    assert [(each.error, each.tokens) for each in completions] == [(None, tokens) for tokens in expected]
    assert max(each.usage.cached_tokens for each in completions) == 60


def test_a_window_that_no_layer_has_does_not_count(tmp_path: Path, open_engine: OpenEngine) -> None:
    path = tiny_models.unused_window(tmp_path / "unused.gguf")
    prompts = [[*STORY, 400 + i] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = open_engine(path, kv_layout="unified", n_ctx=1024, prefix_cache=False, **EXACT)
    expected = [completion.tokens for completion in plain.generate(prompts, params)]
    engine = open_engine(path, kv_layout="unified", n_ctx=256, **EXACT)
    completions = engine.generate(prompts, params)
    assert engine.core.runtime.sharing == "cells"
    assert [(each.error, each.tokens) for each in completions] == [(None, tokens) for tokens in expected]
    assert [each.usage.cached_tokens for each in completions] == [0, len(STORY), len(STORY)]
