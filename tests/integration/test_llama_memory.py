"""Context: sequences share, keep, lose and get back their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cppbatch.errors import LlamaError, OutOfRange
from cppbatch.llama import Context, Model
from tests.contexts import PROMPT, close, decode

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


def test_a_recurrent_model_does_not_claim_to_have_removed_a_beginning(
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


def test_a_whole_sequence_copied_to_another_stream_goes_on_alike(streams_context: Context) -> None:
    decode(streams_context, PROMPT)
    streams_context.copy(0, 2)
    assert np.array_equal(decode(streams_context, [50], 2, 30), decode(streams_context, [50], 0, 30))


def test_a_shared_prefix_takes_its_cells_once(unified_context: Context) -> None:
    decode(unified_context, [7] * 240)
    for seq_id in (1, 2, 3):
        unified_context.copy(0, seq_id)
        decode(unified_context, [8] * 5, seq_id, 240)


# --- saving and restoring ----------------------------------------------------------------------------------------


def test_a_restored_sequence_goes_on_bit_for_bit_under_another_seq_id(context: Context) -> None:
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


def test_a_state_of_another_cache_layout_is_refused_as_such(make_context: Callable[..., Context]) -> None:
    saved, other = make_context(flash_attn="on"), make_context(flash_attn="off")
    decode(saved, PROMPT)
    with pytest.raises(OutOfRange, match="this state is of"):
        other.restore_sequence(0, saved.save_sequence(0))


def test_a_state_without_room_is_refused_and_others_stay(unified_context: Context) -> None:
    decode(unified_context, [7] * 200)
    with pytest.raises(LlamaError, match="no free cells to restore 200 tokens"):
        unified_context.restore_sequence(1, unified_context.save_sequence(0))
    assert [unified_context.last_position(i) for i in range(2)] == [199, -1]
