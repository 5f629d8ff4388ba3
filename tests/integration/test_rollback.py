"""Wrong drafts are removed from recurrent states and sliding windows, and the text is that without drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, EngineConfig, SamplingParams
from cppbatch.engine.runtime import load_runtime
from cppbatch.llama import Batch, Context, Model
from tests.support.contexts import Row, close, decode
from tests.support.fakes import know
from tests.support.native_engines import PROMPTS, SETTINGS, assert_everything_is_free
from tests.support.replay import Replay

N_SEQ, N_TOKENS, MOST = 4, 330, 6  # a sliding window of 32 tokens has 256 cells: they are used again
TEXTS: list[list[int]] = np.random.default_rng(5).integers(10, 90, (N_SEQ, N_TOKENS)).tolist()
MODELS = pytest.mark.parametrize("name", ["tiny_hybrid", "tiny_swa"])
LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])

MakeContext = Callable[..., Context]


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(request.getfixturevalue(name)) as model:
        yield model


def open_context(make_context: MakeContext, model: Model, unified: bool, **sizes: Any) -> Context:
    settings: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": N_SEQ, "type_k": "f32", "type_v": "f32", **sizes}
    return make_context(model, kv_unified=unified, n_rollback=MOST, **settings)


def decode_pieces(context: Context, pieces: Sequence[tuple[int, int, list[int]]]) -> list[Row]:
    """The logits of all tokens of pieces (seq_id, position, tokens): float32[n, n_vocab] of each."""
    batch = Batch(context.n_batch)
    for seq_id, position, tokens in pieces:
        batch.add_run(np.array(tokens, np.int32), position, seq_id, n_logits=len(tokens))
    context.decode(batch)
    logits = context.logits(batch.n_outputs).copy()
    ends = np.cumsum([len(tokens) for _, _, tokens in pieces])
    return np.split(logits, ends[:-1])


def with_wrong(seq_id: int, position: int, n_right: int, n_wrong: int) -> list[int]:
    """The next `n_right` tokens of a text, then others."""
    following = TEXTS[seq_id][position : position + n_right + n_wrong]
    return following[:n_right] + [(token + 7) % 80 + 10 for token in following[n_right:]]


@pytest.mark.each_value
@MODELS
@LAYOUTS
def test_logits_after_removed_drafts_are_those_without_drafts(
    make_context: MakeContext, model: Model, unified: bool
) -> None:
    plain = open_context(make_context, model, unified)
    expected = [[decode(plain, [token], s, i) for i, token in enumerate(text)] for s, text in enumerate(TEXTS)]
    plain.close()
    context = open_context(make_context, model, unified)
    at = [0] * N_SEQ
    for seq_id in (2, 0, 3, 1):  # the states are in another order than the seq_ids
        decode(context, TEXTS[seq_id][: 5 + seq_id], seq_id)
        at[seq_id] = 5 + seq_id
    random = np.random.default_rng(1)
    n_removed = 0
    while max(at) < N_TOKENS - MOST - 1:
        n = int(random.integers(0, MOST + 1))
        right = [1 + int(random.integers(0, n + 1)) for _ in range(N_SEQ)]
        rows = decode_pieces(
            context, [(s, at[s], with_wrong(s, at[s], right[s], n + 1 - right[s])) for s in range(N_SEQ)]
        )
        for seq_id, logits in enumerate(rows):
            for i in range(right[seq_id]):
                assert np.allclose(logits[i], expected[seq_id][at[seq_id] + i], rtol=0, atol=0.01)
            at[seq_id] += right[seq_id]
            assert context.remove(seq_id, at[seq_id])
            assert context.last_position(seq_id) == at[seq_id] - 1
            n_removed += n + 1 - right[seq_id]
    assert n_removed > 50


@pytest.mark.parametrize("name", ["tiny_hybrid"])
@LAYOUTS
def test_nothing_is_removed_where_llama_cpp_would_compute_wrong_logits(
    make_context: MakeContext, model: Model, unified: bool
) -> None:
    context = open_context(make_context, model, unified)
    for seq_id in (2, 0, 3, 1):
        decode(context, TEXTS[seq_id][:5], seq_id)
    decode_pieces(context, [(s, 5, TEXTS[s][5 : 7 + s % 2]) for s in range(N_SEQ)])  # 2 or 3 tokens: several ubatches
    assert not any(context.remove(seq_id, 6) for seq_id in range(N_SEQ))
    context.clear()
    decode(context, TEXTS[0][:20])
    assert not context.remove(0, 20 - MOST - 1)  # more than there are snapshots
    assert context.remove(0, 19)
    assert not context.remove(0, 18)  # not again before the next decode


@pytest.mark.parametrize("name", ["tiny_swa"])
@LAYOUTS
def test_a_sliding_window_allows_drafts_of_different_lengths_where_they_are_one_ubatch(
    make_context: MakeContext, model: Model, unified: bool
) -> None:
    context = open_context(make_context, model, unified)
    decode_pieces(context, [(s, 0, TEXTS[s][: 2 + s]) for s in range(N_SEQ)])
    assert all(context.remove(seq_id, 1) for seq_id in range(N_SEQ)) == unified


@pytest.mark.parametrize("name", ["tiny_hybrid"])
@LAYOUTS
def test_a_sequence_that_was_set_back_can_be_copied_and_saved(
    make_context: MakeContext, model: Model, unified: bool
) -> None:
    context = open_context(make_context, model, unified)
    expected = decode(context, TEXTS[0][:11])
    context.clear()
    decode(context, with_wrong(0, 0, 10, 4))
    assert context.remove(0, 10)
    context.copy(0, 1)
    context.restore_sequence(2, context.save_sequence(0))
    for seq_id in range(3):
        assert close(decode(context, TEXTS[0][10:11], seq_id, 10), expected)


def test_mamba_and_contexts_without_rollback_have_no_snapshots(
    make_context: MakeContext, tiny_mamba: Path, tiny_hybrid: Path
) -> None:
    with Model(tiny_mamba) as mamba, Model(tiny_hybrid) as hybrid:
        assert make_context(mamba, n_rollback=MOST).n_rollback == 0
        assert make_context(hybrid).n_rollback == 0
        assert make_context(hybrid, n_rollback=MOST, n_ubatch=4).n_rollback == 2  # more would abort the process


FREE: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
PARAMS = [SamplingParams(temperature=0, **FREE), SamplingParams(temperature=1, top_k=5, seed=3, **FREE)]


def replaying(path: Path, **settings: Any) -> BatchInferenceEngine:
    """Its drafts are the texts of earlier requests, with some wrong tokens."""
    config = EngineConfig(
        model_path=str(path), **{**SETTINGS, "cache_type_k": "f32", "cache_type_v": "f32", **settings}
    )
    runtime = load_runtime(config)
    engine = BatchInferenceEngine(
        config, runtime=msgspec.structs.replace(runtime, proposers=runtime.proposers and [Replay()])
    )
    know(engine, {1: 0.010, 256: 0.011})  # drafts cost next to nothing
    return engine


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["tiny_hybrid", "tiny_swa", "tiny_mamba"])
@pytest.mark.parametrize("layout", ["unified", "per-sequence", "auto"])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
def test_texts_are_those_without_drafts(
    name: str, layout: str, params: SamplingParams, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    path = request.getfixturevalue(name)
    prompts = [prompt[:60] for prompt in PROMPTS]
    settings: dict[str, Any] = {"kv_layout": layout, "n_ctx": 2048 if layout == "per-sequence" else 512}
    with replaying(path, spec="off", **settings) as engine:
        expected = [each.tokens for each in engine.generate(prompts, params)]
    with replaying(path, **settings) as engine:
        for _ in range(3):
            results = engine.generate(prompts, params)
            assert [each.tokens for each in results] == expected
        stats = engine.stats()
        if name == "tiny_mamba":
            assert stats.drafted_tokens == 0
        else:
            assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert "cannot be removed" not in caplog.text  # no sequence is computed again for its drafts
        assert_everything_is_free(engine)


@MODELS
def test_preempted_sequences_continue_with_the_same_text(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    prompts = ["x" * 50 + str(i) for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with replaying(path, spec="off", kv_layout="unified") as engine:
        expected = [each.tokens for each in engine.generate(prompts, params)]
    with replaying(path, kv_layout="unified", n_ctx=256) as engine:
        for _ in range(2):
            assert [each.tokens for each in engine.generate(prompts, params)] == expected
        stats = engine.stats()
        assert stats.swaps > 0
        assert stats.accepted_tokens > 0
        assert_everything_is_free(engine)


def test_if_drafts_cannot_be_removed_the_log_says_so(tiny_mamba: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cppbatch.engine")
    with BatchInferenceEngine(tiny_mamba, **SETTINGS) as engine:
        assert not engine.core.runtime.proposers
    lines = [record.message for record in caplog.records if "no drafts" in record.message]
    assert lines == [f"no drafts: the recurrent state of {tiny_mamba.name} cannot be rolled back"]
