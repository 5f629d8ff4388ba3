"""Context: sequences share, keep, lose and get back their memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from cppbatch.config import FlashAttention
from cppbatch.errors import LlamaError, OutOfRange
from cppbatch.llama import Batch, Context, Model
from cppbatch.llama.library import C
from tests.support.contexts import PROMPT, close, decode

# --- remove, copy, clear -----------------------------------------------------------------------------------------


def test_a_removed_sequence_is_empty_and_the_others_stay(context: Context) -> None:
    decode(context, PROMPT, seq_id=0)
    decode(context, PROMPT, seq_id=1)
    assert context.remove(0)
    assert [context.last_position(i) for i in range(2)] == [-1, 29]


def test_a_removed_tail_can_be_computed_again(context: Context) -> None:
    whole = decode(context, PROMPT)
    assert context.remove(0, 12)
    assert context.last_position(0) == 11
    assert close(decode(context, PROMPT[12:], position=12), whole)


def test_clear_empties_every_sequence(context: Context) -> None:
    for seq_id in range(4):
        decode(context, PROMPT, seq_id)
    context.clear()
    assert [context.last_position(i) for i in range(4)] == [-1] * 4


def test_a_recurrent_model_refuses_to_remove_a_part_and_removes_everything(
    make_context: Callable[..., Context], tiny_mamba: Path
) -> None:
    with Model(tiny_mamba) as mamba:
        context = make_context(mamba)
        decode(context, PROMPT)
        assert not context.remove(0, 12)
        assert context.last_position(0) == 29
        assert context.remove(0)
        assert context.last_position(0) == -1


def test_a_recurrent_model_does_not_claim_to_have_removed_a_prefix(
    make_context: Callable[..., Context], tiny_mamba: Path
) -> None:
    with Model(tiny_mamba) as mamba:
        context = make_context(mamba)
        decode(context, PROMPT)
        assert not context.remove(0, 0, 5)


def test_a_recurrent_model_does_not_copy_a_part_as_if_it_were_the_whole(
    make_context: Callable[..., Context], tiny_mamba: Path
) -> None:
    with Model(tiny_mamba) as mamba:
        context = make_context(mamba)
        decode(context, PROMPT)
        with pytest.raises(OutOfRange):
            context.copy(0, 1, 0, 20)
        assert context.last_position(1) == -1


def test_a_copied_prefix_gives_the_logits_of_recomputing_it(unified_context: Context) -> None:
    whole = decode(unified_context, PROMPT)
    unified_context.copy(0, 1, 0, 20)
    assert unified_context.last_position(1) == 19
    assert close(decode(unified_context, PROMPT[20:], 1, 20), whole)


def test_a_whole_sequence_copied_to_another_stream_continues_identically(streams_context: Context) -> None:
    decode(streams_context, PROMPT)
    streams_context.copy(0, 2)
    assert np.array_equal(decode(streams_context, [50], 2, 30), decode(streams_context, [50], 0, 30))


def test_a_sequence_computes_in_the_decode_that_moves_it_while_padding_takes_its_old_stream(
    streams_context: Context,
) -> None:
    expected = decode(streams_context, PROMPT, seq_id=1)
    decode(streams_context, PROMPT[:29], seq_id=3)
    streams_context.copy(3, 2)
    streams_context.remove(3)
    batch = Batch(8)
    for seq_id, token, position in ((1, 7, 30), (2, PROMPT[29], 29), (3, 0, 0)):
        batch.add_run(np.array([token], np.int32), position, seq_id, n_logits=1)
    streams_context.decode(batch)
    assert close(streams_context.logits(3)[1], expected)
    streams_context.remove_padding(3, 0)
    assert [streams_context.last_position(i) for i in (1, 2, 3)] == [30, 29, -1]


def test_padding_behind_a_prefix_leaves_no_trace(streams_context: Context) -> None:
    expected = decode(streams_context, PROMPT, seq_id=0)
    decode(streams_context, PROMPT[:29], seq_id=1)
    decode(streams_context, [0], seq_id=1, position=29)
    streams_context.remove_padding(1, 29)
    assert close(decode(streams_context, PROMPT[29:], seq_id=1, position=29), expected)


def test_a_prompt_may_begin_among_the_rows_and_end_behind_them(streams_context: Context) -> None:
    expected = decode(streams_context, PROMPT, seq_id=3)
    decode(streams_context, PROMPT[:29], seq_id=0)
    decode(streams_context, PROMPT[:29], seq_id=2)
    batch = Batch(64)
    for seq_id, start, stop in ((0, 29, 30), (1, 0, 1), (2, 29, 30), (1, 1, 30)):
        batch.add_run(PROMPT[start:stop], start, seq_id, n_logits=int(stop == 30))
    streams_context.decode(batch)
    assert all(close(row, expected) for row in streams_context.logits(3))


def test_a_shared_prefix_takes_its_cells_once(unified_context: Context) -> None:
    decode(unified_context, [7] * 240)
    for seq_id in (1, 2, 3):
        unified_context.copy(0, seq_id)
        decode(unified_context, [8] * 5, seq_id, 240)


# --- saving and restoring ----------------------------------------------------------------------------------------


def test_a_restored_sequence_continues_bit_for_bit_under_another_seq_id(context: Context) -> None:
    decode(context, PROMPT)
    state = context.save_sequence(0)
    expected = decode(context, [50], 0, 30)
    context.clear()
    context.restore_sequence(3, state)
    assert state.n_tokens == 30
    assert context.last_position(3) == 29
    assert np.array_equal(decode(context, [50], 3, 30), expected)


@pytest.mark.parametrize("n_before", [0, 5, 40])
def test_restoring_replaces_what_the_sequence_held(context: Context, n_before: int) -> None:
    if n_before:
        decode(context, [7] * n_before)
    state = context.save_sequence(0)
    decode(context, PROMPT, seq_id=1)
    context.restore_sequence(1, state)
    assert context.last_position(1) == n_before - 1


def test_a_state_of_another_model_is_refused(
    make_context: Callable[..., Context], context: Context, tiny_mamba: Path
) -> None:
    decode(context, PROMPT)
    with Model(tiny_mamba) as mamba, pytest.raises(OutOfRange, match="tiny-mamba"):
        make_context(mamba, kv_unified=context.kv_unified).restore_sequence(0, context.save_sequence(0))


def test_a_state_without_room_is_refused_and_others_stay(unified_context: Context) -> None:
    decode(unified_context, [7] * 200)
    with pytest.raises(LlamaError, match="no free cells to restore 200 tokens"):
        unified_context.restore_sequence(1, unified_context.save_sequence(0))
    assert [unified_context.last_position(i) for i in range(2)] == [199, -1]


# --- from one layout to the other ----------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of KV cache."""

    kv_unified: bool
    flash_attn: FlashAttention


KINDS = [Kind(kv_unified, flash_attn) for kv_unified in (True, False) for flash_attn in ("on", "off")]


def reopen(context: Context, kind: Kind) -> None:
    context.reopen(n_ctx=1024, kv_unified=kind.kv_unified, flash_attn=kind.flash_attn)


@pytest.fixture(params=["tiny_llama", "tiny_swa", "tiny_mrope"])
def any_context(make_context: Callable[..., Context], request: pytest.FixtureRequest) -> Iterator[Context]:
    with Model(request.getfixturevalue(request.param)) as model:
        yield make_context(model)


@pytest.mark.each_value
@pytest.mark.parametrize("seq_id", [0, 1, 3])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(KINDS, 2)))
def test_a_state_is_carried_to_another_kind_of_cache_bit_for_bit(
    any_context: Context, before: Kind, after: Kind, seq_id: int
) -> None:
    context = any_context
    reopen(context, before)
    decode(context, [7] * 40, 2)  # so that cells of others are before, between and after
    decode(context, PROMPT, seq_id)
    decode(context, [8] * 20, 2, 40)
    decode(context, [9] * 15, seq_id, 30)
    state, other = context.save_sequence(seq_id), context.save_sequence(2)
    reopen(context, after)
    assert [context.last_position(i) for i in range(4)] == [-1] * 4
    context.restore_sequence(1, other)
    context.restore_sequence(2, state)
    assert [context.last_position(i) for i in range(4)] == [-1, 59, 44, -1]
    there = context.save_sequence(2)
    reopen(context, before)
    context.restore_sequence(seq_id, there)
    assert np.array_equal(context.save_sequence(seq_id).data, state.data)


@pytest.mark.parametrize("after", KINDS)
def test_a_carried_sequence_continues_as_in_its_original_context(any_context: Context, after: Kind) -> None:
    reopen(any_context, Kind(kv_unified=False, flash_attn="off"))
    decode(any_context, PROMPT, 3)
    state = any_context.save_sequence(3)
    expected = decode(any_context, [50], 3, 30)
    reopen(any_context, after)
    any_context.restore_sequence(0, state)
    assert close(decode(any_context, [50], 0, 30), expected)


@pytest.mark.parametrize("word", [2, 4, 5, -1])
def test_a_state_of_an_unknown_form_is_refused(unified_context: Context, word: int) -> None:
    context = unified_context
    reopen(context, Kind(kv_unified=False, flash_attn="off"))
    decode(context, PROMPT, 2)
    state = context.save_sequence(2)
    state.data.view(np.uint32)[word] = 31
    reopen(context, Kind(kv_unified=True, flash_attn="off"))
    with pytest.raises(OutOfRange, match="other layouts cannot read"):
        context.restore_sequence(0, state)
    assert context.last_position(0) == -1


@pytest.mark.parametrize("n_cut", range(1, 5000, 97))
def test_a_state_that_is_cut_off_is_refused(unified_context: Context, n_cut: int) -> None:
    context = unified_context
    decode(context, PROMPT, 2)
    whole = context.save_sequence(2)
    state = replace(whole, data=whole.data[:-n_cut])
    reopen(context, Kind(kv_unified=True, flash_attn="on"))
    with pytest.raises(LlamaError):
        context.restore_sequence(0, state)
    assert context.last_position(0) == -1


def test_a_context_is_empty_after_it_was_opened_again(make_context: Callable[..., Context]) -> None:
    context, fresh = make_context(n_ctx=1024, kv_unified=False), make_context(n_ctx=512)
    expected = decode(fresh, PROMPT)
    decode(context, PROMPT, 1)
    context.reopen(n_ctx=512, kv_unified=True, flash_attn="off")
    assert (context.n_ctx, context.n_ctx_seq, context.n_seq_ids) == (fresh.n_ctx, fresh.n_ctx_seq, fresh.n_seq_ids)
    assert np.array_equal(decode(context, PROMPT), expected)


def test_a_context_that_cannot_be_made_again_is_closed_and_may_be_tried_once_more(
    unified_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(C, "llama_init_from_model", lambda model, params: None)
        with pytest.raises(LlamaError, match="cannot create a context"):
            reopen(unified_context, KINDS[0])
    with pytest.raises(LlamaError, match="closed"):
        unified_context.last_position(0)
    reopen(unified_context, KINDS[0])
    decode(unified_context, PROMPT)


def test_a_sequence_takes_the_cells_of_an_equal_prefix_in_place_of_its_own(unified_context: Context) -> None:
    context = unified_context  # 256 cells
    decode(context, [7] * 100, 0)
    decode(context, [7] * 100, 1)
    expected = decode(context, [8] * 10, 1, 100)
    context.remove(1, 100)
    context.share_prefix(0, 1, 95)
    assert [context.last_position(i) for i in range(2)] == [99, 99]
    assert close(decode(context, [8] * 10, 1, 100), expected)
    decode(context, [9] * 140, 2)  # only if 95 cells became free


def test_a_prefix_longer_than_the_sequence_cannot_be_shared(unified_context: Context) -> None:
    decode(unified_context, PROMPT, 0)
    decode(unified_context, PROMPT[:20], 1)
    for n in (0, 21):
        with pytest.raises(OutOfRange):
            unified_context.share_prefix(0, 1, n)
