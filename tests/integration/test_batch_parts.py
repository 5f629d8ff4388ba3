"""Logits are right in batches that llama.cpp computes wrong, and for copies with cells that are computed later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.errors import LlamaError
from cppbatch.llama import Batch, Context, Model
from cppbatch.llama.batch_parts import single_ubatches
from tests.archs.rollback_schedules import run_schedule
from tests.support import tiny_models
from tests.support.contexts import close, decode
from tests.support.native_engines import PROMPTS, SETTINGS

MakeContext = Callable[..., Context]

LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
F32 = {"type_k": "f32", "type_v": "f32"}


@LAYOUTS
def test_a_window_keeps_what_the_first_ubatch_of_a_prompt_sees(tiny_swa: Path, unified: bool) -> None:
    with Model(tiny_swa) as model:
        outcome = run_schedule(model, unified=unified, seed=0)  # two ubatches, and cells scattered by restored states
        assert outcome
        assert outcome.difference < 1e-3  # 0.5 where the unified batch is one decode
        assert outcome.removed > 50


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
@pytest.mark.parametrize("make", [tiny_models.states_in_ubatches, tiny_models.rows_of_all_tokens])
def test_texts_in_a_batch_are_those_of_each_decode_alone(
    make: Callable[[Path], Path], layout: str, make_context: MakeContext, tmp_path: Path
) -> None:
    path = make(tmp_path / "model.gguf")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settings = {**SETTINGS, "kv_layout": layout, "cache_type_k": "f32", "cache_type_v": "f32"}
    with BatchInferenceEngine(path, **settings) as engine:
        texts = [each.tokens for each in engine.generate(PROMPTS, params)]
        prompts = [[piece.id for piece in engine.tokens(prompt)] for prompt in PROMPTS]
    with Model(path) as model:
        for prompt, text in zip(prompts, texts, strict=True):
            context = make_context(model, n_ctx=512, **F32)
            rows = [decode(context, [token], position=i) for i, token in enumerate([*prompt, *text])]
            assert [int(row.argmax()) for row in rows[len(prompt) - 1 : -1]] == text
            context.close()


@LAYOUTS
@pytest.mark.parametrize("samples", [False, True], ids=["logits", "candidates"])
def test_a_batch_with_more_rows_than_its_device_reserves_gives_the_same_rows(
    make_context: MakeContext, unified: bool, samples: bool
) -> None:
    sizes = {"n_ctx": 1024, "kv_unified": unified, **F32}
    whole, in_parts = make_context(**sizes), make_context(**sizes, n_outputs=4)
    assert not samples or in_parts.enable_backend_sampling(16)
    backend = in_parts.backend_sampling
    batch = Batch(64)
    for seq_id in range(4):
        batch.add_run(np.arange(10 + seq_id, 20 + seq_id, dtype=np.int32), 0, seq_id, n_logits=1 if samples else 5)
    if samples:
        for seq_id in range(4):
            batch.wants_logits[10 * seq_id] = seq_id == 3  # one more than 4: of a sequence whose rows are whole
        batch.n_outputs += 1
        assert backend
        backend.set_enabled(3, False)
    n = batch.n_outputs
    for context in (whole, in_parts):
        context.decode(batch)
    expected = whole.logits(n)
    if not backend:
        assert np.allclose(in_parts.logits(n), expected, atol=1e-5)
        return
    ids, values = backend.candidates([0, 1, 2], n)
    assert ids[np.arange(3), values.argmax(axis=1)].tolist() == expected[:3].argmax(axis=1).tolist()
    assert np.allclose(in_parts.logits(n)[3:], expected[3:], atol=1e-5)


def test_a_stream_that_is_still_to_be_copied_is_neither_saved_nor_overwritten(
    make_context: MakeContext, tiny_llama: Path
) -> None:
    with Model(tiny_llama) as model:
        context = make_context(model, n_ctx=512, n_seq_max=4, kv_unified=False, **F32)
        tokens = np.arange(10, 40, dtype=np.int32)
        for seq_id in range(2):
            decode(context, tokens + seq_id, seq_id)
        saved = context.save_sequence(0)
        context.copy(1, 2)
        with pytest.raises(LlamaError, match="next decode"):
            context.save_sequence(2)
        for seq_id in (1, 2):
            with pytest.raises(LlamaError, match="next decode"):
                context.restore_sequence(seq_id, saved)
        context.remove(2)
        context.copy(0, 2)
        context.save_sequence(0)  # a source is whole
        decode(context, tokens, 3)
        context.restore_sequence(1, saved)
        assert close(decode(context, [50], 1, 30), decode(context, [50], 2, 30))


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        ([1, 1, 1, 24], {"equal_runs": True}, [(0, 3), (3, 27)]),
        ([1, 70], {"equal_runs": True}, [(0, 1), (1, 33), (33, 65), (65, 71)]),
        ([20, 20, 4], {"equal_runs": True}, [(0, 20), (20, 40), (40, 44)]),
        ([1, 1, 24], {"equal_runs": False}, [(0, 26)]),
        ([1, 1, 40], {"equal_runs": False}, [(0, 32), (32, 42)]),
        ([1, 1, 40], {"equal_runs": True, "alone": True}, [(0, 1), (1, 2), (2, 34), (34, 42)]),
    ],
)
def test_each_part_is_one_ubatch(lengths: list[int], options: dict[str, bool], expected: list[tuple[int, int]]) -> None:
    batch = Batch(128)
    for seq_id, n in enumerate(lengths):
        batch.add_run(np.zeros(n, np.int32), 0, seq_id, n_logits=1)
    assert single_ubatches(batch, 32, **options) == expected
