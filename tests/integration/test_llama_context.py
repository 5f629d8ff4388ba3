"""Context: bad arguments never reach C, full cells change nothing, and logits are llama.cpp's own memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cppbatch.errors import CacheFull, LlamaError, OutOfRange
from cppbatch.llama import Batch, Context, Model
from tests.support.contexts import PROMPT, close, decode


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads") for value in (0, -1, 2**31)),
        *(("n_seq_max", value) for value in (0, -1, 257)),
    ],
)
def test_sizes_out_of_range_are_refused_with_their_name_and_value(
    make_context: Callable[..., Context], name: Any, value: Any
) -> None:
    with pytest.raises(OutOfRange, match=f"{name} is {value}"):
        make_context(**{name: value})


@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_batch_may_be_as_small_as_a_token_for_each_sequence(
    make_context: Callable[..., Context], kv_unified: bool
) -> None:
    context, batch = make_context(n_batch=4, kv_unified=kv_unified), Batch(4)  # llama.cpp would abort here
    batch.add_rows([7] * 4, [0] * 4, [0, 1, 2, 3])
    context.decode(batch)
    assert context.logits(4).shape[0] == 4


def test_the_reported_sizes_are_the_actual_ones(make_context: Callable[..., Context]) -> None:
    assert make_context(n_ctx=100).n_ctx == 256
    context = make_context(n_ctx=1024, kv_unified=False, n_ubatch=32)
    assert (context.n_ctx, context.n_ctx_seq, context.n_seq_max, context.n_ubatch) == (1024, 256, 4, 32)


@pytest.mark.parametrize(
    ("token", "position", "seq_id", "name"),
    [
        (-1, 0, 0, "token id -1"),
        (512, 0, 0, "token id 512"),
        (5, -1, 0, "position -1"),
        (5, 256, 0, "position 256"),
        (5, 0, -1, "seq_id -1"),
        (5, 0, 4, "seq_id 4"),
    ],
)
def test_a_batch_with_one_bad_entry_is_refused_and_changes_nothing(
    context: Context, token: int, position: int, seq_id: int, name: str
) -> None:
    batch = Batch(8)
    batch.add_rows([7, token], [0, position], [1, seq_id])
    with pytest.raises(OutOfRange, match=name):
        context.decode(batch)
    assert [context.last_position(i) for i in range(4)] == [-1] * 4


def test_an_empty_batch_and_one_with_too_many_tokens_are_refused(context: Context) -> None:
    with pytest.raises(OutOfRange, match="0 tokens"):
        context.decode(Batch(8))
    batch = Batch(257)
    batch.add_run(np.full(257, 7, np.int32), 0, 0, n_logits=1)
    with pytest.raises(OutOfRange, match="257 tokens"):
        context.decode(batch)


def test_streams_have_as_many_seq_ids_as_run_and_shared_cells_as_many_as_llama_cpp_has(
    make_context: Callable[..., Context],
) -> None:
    assert make_context(n_ctx=1024, kv_unified=False).n_seq_ids == 4
    assert make_context().n_seq_ids == 255
    assert make_context(n_seq_max=256).n_seq_ids == 256


def test_a_seq_id_that_no_batch_may_have_can_hold_cells_for_others(unified_context: Context) -> None:
    expected = decode(unified_context, PROMPT)
    unified_context.copy(0, 254, 0, 20)
    unified_context.remove(0)
    unified_context.copy(254, 1, 0, 20)
    assert close(decode(unified_context, PROMPT[20:], seq_id=1, position=20), expected)
    unified_context.restore_sequence(2, unified_context.save_sequence(254))
    assert close(decode(unified_context, PROMPT[20:], seq_id=2, position=20), expected)
    assert [unified_context.last_position(i) for i in (0, 254)] == [-1, 19]


@pytest.mark.parametrize("far_out", [False, True])
def test_a_seq_id_out_of_range_is_refused_everywhere(context: Context, far_out: bool) -> None:
    seq_id = context.n_seq_ids if far_out else -1
    decode(context, PROMPT)
    state = context.save_sequence(0)
    for use in (
        lambda: context.remove(seq_id),
        lambda: context.copy(seq_id, 0),
        lambda: context.copy(0, seq_id),
        lambda: context.last_position(seq_id),
        lambda: context.save_sequence(seq_id),
        lambda: context.restore_sequence(seq_id, state),
    ):
        with pytest.raises(OutOfRange, match=f"seq_id is {seq_id}"):
            use()


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, -1), (3, 5)])
def test_a_partial_copy_between_streams_is_refused(streams_context: Context, start: int, stop: int) -> None:
    decode(streams_context, PROMPT)
    with pytest.raises(OutOfRange, match=f"{start} to {stop}"):
        streams_context.copy(0, 1, start, stop)
    assert streams_context.last_position(1) == -1


@pytest.mark.parametrize("n_outputs", [2, 1000, -1])
def test_more_rows_of_logits_than_were_computed_are_refused(context: Context, n_outputs: int) -> None:
    decode(context, PROMPT)
    with pytest.raises(OutOfRange):
        context.logits(n_outputs)


def test_logits_before_the_first_decode_are_refused(context: Context) -> None:
    with pytest.raises(OutOfRange, match="the last decode produced 0"):
        context.logits(1)


def test_a_batch_without_room_raises_cache_full_and_changes_nothing(make_context: Callable[..., Context]) -> None:
    untouched, context = make_context(), make_context()
    for each in (untouched, context):
        decode(each, [7] * 200)
    with pytest.raises(CacheFull, match="100 tokens among 256"):
        decode(context, [8] * 100, seq_id=1)
    assert [context.last_position(i) for i in range(4)] == [199, -1, -1, -1]
    assert np.array_equal(decode(context, [9], position=200), decode(untouched, [9], position=200))


def test_after_cache_full_a_batch_that_fits_still_computes(unified_context: Context) -> None:
    decode(unified_context, [7] * 200)
    with pytest.raises(CacheFull):
        decode(unified_context, [8] * 57, seq_id=1)
    decode(unified_context, [8] * 56, seq_id=1)
    assert unified_context.last_position(1) == 55


def test_removed_cells_are_free_at_once(unified_context: Context) -> None:
    for _ in range(5):
        decode(unified_context, [7] * 256)
        assert unified_context.remove(0)


def test_logits_are_a_writable_view_of_llama_cpps_own_memory(context: Context) -> None:
    batch = Batch(8)
    batch.add_rows([5, 6], [0, 0], [0, 1])
    context.decode(batch)
    logits = context.logits(2)
    assert logits.shape == (2, 512)
    assert logits.dtype == np.float32
    logits[1, 3] = 123.0
    assert context.logits(2)[1, 3] == 123.0
    assert np.shares_memory(logits, context.logits(2))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
@pytest.mark.parametrize("kv_unified", [True, False])
def test_logits_keep_the_batchs_order_when_the_batch_is_split(
    make_context: Callable[..., Context], order: Any, kv_unified: bool
) -> None:
    context = make_context(n_ctx=1024, n_ubatch=8, kv_unified=kv_unified)
    prompts = [PROMPT[:3], PROMPT[:20], PROMPT[5:6], PROMPT[7:27]]
    alone = [decode(make_context(), prompt) for prompt in prompts]
    batch = Batch(256)
    for i in order:
        batch.add_run(prompts[i], 0, i, n_logits=1)
    context.decode(batch)
    assert all(close(row, alone[i]) for row, i in zip(context.logits(4), order, strict=True))


def test_a_model_may_be_closed_before_its_contexts(tiny_llama: Path) -> None:
    model = Model(tiny_llama)
    contexts = [Context(model, n_ctx=256, n_threads=1) for _ in range(2)]
    model.close()
    for context in contexts:
        with pytest.raises(LlamaError, match="closed"):
            decode(context, PROMPT)
        context.close()
    model.close()


def test_a_closed_context_refuses_use(context: Context) -> None:
    decode(context, PROMPT)
    state = context.save_sequence(0)
    with context:
        pass
    context.close()
    for use in (
        lambda: decode(context, PROMPT),
        lambda: context.logits(1),
        lambda: context.remove(0),
        lambda: context.copy(0, 1),
        context.clear,
        lambda: context.last_position(0),
        lambda: context.save_sequence(0),
        lambda: context.restore_sequence(0, state),
    ):
        with pytest.raises(LlamaError, match="closed"):
            use()
