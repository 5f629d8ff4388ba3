"""Batch: numpy writes whole arrays, llama.cpp reads the same memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from cppbatch.errors import OutOfRange
from cppbatch.llama import Batch


@pytest.fixture
def batch() -> Batch:
    return Batch(16)


def run(n: int, start: int = 100) -> npt.NDArray[np.int32]:
    return np.arange(start, start + n, dtype=np.int32)


def as_llama_cpp_reads_it(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(token, position, seq_id, wants_logits) of every token, through the struct's pointers."""
    struct = batch.struct
    rows = range(struct.n_tokens)
    assert [struct.n_seq_id[i] for i in rows] == [1] * struct.n_tokens
    return [(struct.token[i], struct.pos[i], struct.seq_id[i][0], struct.logits[i]) for i in rows]


def test_a_run_is_one_sequences_tokens_with_logits_for_the_last(batch: Batch) -> None:
    batch.add_run(run(3), 7, 2, n_logits=1)
    assert as_llama_cpp_reads_it(batch) == [(100, 7, 2, 0), (101, 8, 2, 0), (102, 9, 2, 1)]
    assert batch.n_outputs == 1


def test_a_run_in_the_middle_of_a_prompt_has_no_logits(batch: Batch) -> None:
    batch.add_run(run(2), 0, 0, n_logits=0)
    assert as_llama_cpp_reads_it(batch) == [(100, 0, 0, 0), (101, 1, 0, 0)]
    assert batch.n_outputs == 0


def test_rows_are_one_token_of_each_sequence_with_logits(batch: Batch) -> None:
    batch.add_rows([5, 6], [10, 20], [1, 3])
    assert as_llama_cpp_reads_it(batch) == [(5, 10, 1, 1), (6, 20, 3, 1)]
    assert batch.n_outputs == 2


def test_rows_and_runs_follow_each_other(batch: Batch) -> None:
    batch.add_rows([5], [10], [1])
    batch.add_run(run(2), 0, 2, n_logits=1)
    assert as_llama_cpp_reads_it(batch) == [(5, 10, 1, 1), (100, 0, 2, 0), (101, 1, 2, 1)]


def test_a_refilled_batch_has_no_tokens_of_the_last_step(batch: Batch) -> None:
    batch.add_rows([1] * 16, [2] * 16, [3] * 16)
    batch.clear()
    assert (batch.struct.n_tokens, batch.n_outputs) == (0, 0)
    batch.add_run(run(2), 0, 0, n_logits=0)
    assert as_llama_cpp_reads_it(batch) == [(100, 0, 0, 0), (101, 1, 0, 0)]


def test_whole_array_writes_are_seen_by_llama_cpp(batch: Batch) -> None:
    batch.add_rows([0] * 16, [0] * 16, [0] * 16)
    batch.tokens[:] = run(16)
    batch.positions[:] = run(16, 200)
    batch.seq_ids[:] = run(16, 0)
    assert as_llama_cpp_reads_it(batch) == [(100 + i, 200 + i, i, 1) for i in range(16)]


def test_a_full_batch_refuses_more_and_stays_as_it_is(batch: Batch) -> None:
    batch.add_run(run(15), 0, 0, n_logits=1)
    before = as_llama_cpp_reads_it(batch)
    with pytest.raises(OutOfRange, match="17 tokens exceed the batch capacity of 16"):
        batch.add_run(run(2), 0, 1, n_logits=1)
    with pytest.raises(OutOfRange, match="17 tokens"):
        batch.add_rows([1, 2], [0, 0], [1, 2])
    assert as_llama_cpp_reads_it(batch) == before
    assert batch.n_outputs == 1


def test_an_empty_run_asks_for_no_logits(batch: Batch) -> None:
    with pytest.raises(OutOfRange):
        batch.add_run(run(0), 0, 0, n_logits=1)
    assert batch.n_outputs == 0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_batch_holds_at_least_one_token(capacity: int) -> None:
    with pytest.raises(OutOfRange, match=str(capacity)):
        Batch(capacity)
