"""Padding rows: spare seq_ids that are computed with the decode rows where that is faster, and change nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, Completion
from cppbatch.config import Sharing
from cppbatch.engine.kv.batch_order import BatchEntry, PaddingRow, in_batch_order, with_min_rows
from tests.support.fakes import context_of, drain, fake_engine, greedy, know, ubatches

TILES = {1: 0.005} | {n: 0.010 if n in (4, 8, 16) else 0.030 for n in range(2, 17)}
"""Seconds by rows of a device that computes whole tiles three times as fast as other numbers of rows."""


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("n", "rows"), [(2, 4), (3, 4), (4, 4), (6, 8), (7, 8)])
def test_a_step_computes_whole_tiles(unified: bool, n: int, rows: int) -> None:
    engine = fake_engine(n_ctx=400, n_batch=40, n_parallel=8, unified=unified, may_pad=True)
    know(engine, TILES)
    for i in range(n):
        engine.add_request([i + 1, 2], greedy(20, ignore_eos=True))
    drain(engine)
    steps = context_of(engine).steps
    assert [sum(step.values()) for step in steps[1:]] == [rows] * 19
    assert engine.stats().decode_rows == 19 * n, "padding rows are not sequences"
    assert engine.stats().kv_cells_used == 0


@pytest.mark.parametrize("unified", [True, False])
def test_texts_are_those_without_padding(unified: bool) -> None:
    def texts(may_pad: bool) -> list[list[int]]:
        engine = fake_engine(n_ctx=800, n_batch=40, n_parallel=8, unified=unified, may_pad=may_pad)
        know(engine, TILES)
        params = [greedy(3 + 5 * i, ignore_eos=True, logprobs=2 if i % 2 else None) for i in range(7)]
        return [result.tokens for result in engine.generate([[i, 1] for i in range(7)], params)]

    assert texts(True) == texts(False)


def test_where_sequences_have_streams_padding_fills_the_gaps_between_them() -> None:
    engine = fake_engine(n_ctx=800, n_batch=40, n_parallel=8, unified=False, may_pad=True)
    know(engine, dict.fromkeys(range(1, 9), 0.01))
    lengths = (40, 4, 40, 40, 4, 40)
    engine.generate([[i, 1] for i in range(6)], [greedy(n, ignore_eos=True) for n in lengths])
    assert list(context_of(engine).steps[20]) == [0, 1, 2, 3, 4, 5], "one group of six rows, two of them padding"


def test_gaps_stay_where_filling_them_costs_more() -> None:
    engine = fake_engine(n_ctx=800, n_batch=40, n_parallel=8, unified=False, may_pad=True)
    know(engine, {n: 0.010 * n for n in range(1, 9)})
    lengths = (40, 4, 4, 40)
    engine.generate([[i, 1] for i in range(4)], [greedy(n, ignore_eos=True) for n in lengths])
    assert list(context_of(engine).steps[20]) == [0, 3]


STEEP = {n: 0.005 + 0.005 * n for n in range(1, 9)}
"""Seconds by rows: two groups cost 5 ms more than one, and a padding row costs as much."""


@pytest.mark.parametrize("sharing", ["none", "copy"])
def test_a_gap_that_lasts_is_closed_and_texts_are_those_of_each_alone(sharing: Sharing) -> None:
    def engine() -> BatchInferenceEngine:
        engine = fake_engine(n_ctx=800, n_batch=80, n_parallel=8, unified=False, sharing=sharing, may_pad=True)
        know(engine, STEEP)
        return engine

    lengths = (60, 4, 60, 60, 4, 60)
    prompts, params = [[i + 1] * 20 for i in range(6)], [greedy(n, ignore_eos=True) for n in lengths]
    together = engine()
    texts = [result.tokens for result in together.generate(prompts, params)]
    assert list(context_of(together).steps[30]) == [0, 1, 2, 3]
    together.core.kv.check()
    assert texts == [engine().generate([p], g)[0].tokens for p, g in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_gap_of_several_seq_ids_is_closed_by_moving_the_smaller_group(on_gpu: bool) -> None:
    sizes: dict[str, Any] = {"n_ctx": 800, "n_batch": 80, "n_parallel": 8}
    engine = fake_engine(unified=False, sharing="copy", may_pad=True, on_gpu=on_gpu, **sizes)
    know(engine, STEEP)
    lengths = (60, 60, 4, 4, 4, 60, 60, 60)
    engine.generate([[i + 1] * 8 for i in range(8)], [greedy(n, ignore_eos=True) for n in lengths])
    assert [0, 1, 5, 6, 7] in map(list, context_of(engine).steps), "usually a new sequence soon fills a gap"
    assert list(context_of(engine).steps[30]) == [3, 4, 5, 6, 7]
    has_paused = [5, 6, 7] in map(list, context_of(engine).steps)
    assert has_paused != on_gpu, "a GPU copies cells in the decode that computes the moved sequences"
    engine.core.kv.check()


def test_a_gap_stays_while_a_request_waits_for_it_or_where_little_is_left_to_gain() -> None:
    engine = fake_engine(n_ctx=800, n_batch=40, n_parallel=4, unified=False, may_pad=True)
    know(engine, STEEP)
    for i, n in enumerate((40, 4, 40, 7)):
        engine.add_request([i + 1, 1], greedy(n, ignore_eos=True))
    drain(engine)
    assert [list(step) for step in context_of(engine).steps[4:7]] == [[0, 2, 3]] * 3, "seq_id 3 soon ends"


def test_padding_takes_no_cells_that_sequences_need() -> None:
    engine = fake_engine(n_ctx=12, n_batch=40, n_parallel=8, unified=True, may_pad=True)
    know(engine, TILES)
    engine.generate([[i, 1] for i in range(3)], greedy(2, ignore_eos=True))  # 3 x 3 cells, one more for padding
    results = engine.generate([[i, 1] for i in range(3)], greedy(3, ignore_eos=True))
    assert [result.finish_reason for result in results] == ["length"] * 3


def test_prompts_are_computed_in_whole_tiles_beside_the_rows() -> None:
    engine = fake_engine(n_ctx=400, n_batch=64, n_parallel=8, unified=True, may_pad=True)
    for i in range(5):
        engine.add_request([i + 1, 2], greedy(60, ignore_eos=True))
    for _ in range(9):
        engine.step()
    engine.add_request([7] * 150, greedy(1))
    sizes = []
    while any(s.n_computed < s.n_prompt for s in engine.core.scheduler.running) or engine.stats().waiting:
        engine.step()
        sizes.append(sum(context_of(engine).steps[-1].values()))
    pieces = [size for size in sizes[:-1] if size > 8]
    assert pieces
    assert all(size % 16 == 0 for size in pieces)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_cached_prefixes_between_rows_make_way_for_padding_and_are_found_again(on_gpu: bool) -> None:
    """On a GPU, padding rows follow the prefixes in their streams."""
    sizes: dict[str, Any] = {"n_ctx": 8 * 64, "n_batch": 80, "n_parallel": 8}
    engine = fake_engine(unified=False, sharing="copy", may_pad=True, on_gpu=on_gpu, **sizes)
    know(engine, dict.fromkeys(range(1, 9), 0.01))
    prompts = [[i + 1] * 30 for i in range(6)]
    engine.generate(prompts, [greedy(n, ignore_eos=True) for n in (30, 4, 30, 30, 4, 30)])
    assert list(context_of(engine).steps[15]) == [0, 1, 2, 3, 4, 5]
    (result,) = engine.generate([prompts[1]], greedy(1))
    assert result.usage.cached_tokens == 29


def test_tokens_of_prompts_fill_the_gaps_between_rows_first() -> None:
    engine = fake_engine(n_ctx=8 * 300, n_batch=80, n_parallel=8, unified=False, may_pad=True)
    know(engine, dict.fromkeys(range(1, 9), 0.01))
    for i in range(6):
        engine.add_request([i + 1, 1], greedy(4 if i in (1, 4) else 60, ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.add_request([9] * 200, greedy(1))
    engine.step()
    step = context_of(engine).steps[-1]
    assert list(step)[:6] == [0, 1, 2, 3, 4, 5]
    assert step[1] > 1, "the new prompt has seq_id 1"
    assert step[4] == 1, "and seq_id 4 is padding"


def test_a_prompt_that_ends_among_the_rows_keeps_their_logits_in_batch_order() -> None:
    engine = fake_engine(n_ctx=8 * 300, n_batch=80, n_parallel=8, unified=False, may_pad=True)
    know(engine, dict.fromkeys(range(1, 9), 0.01))
    for i in range(6):
        engine.add_request([i + 1, 1], greedy(4 if i == 1 else 60, ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.add_request([9] * 30, greedy(20, ignore_eos=True))
    engine.step()
    assert context_of(engine).steps[-1] == {0: 1, 1: 30, 2: 1, 3: 1, 4: 1, 5: 1}
    assert context_of(engine).computes_rows_in_order(), "llama.cpp would swap rows"


@pytest.mark.parametrize("min_rows", [1, 2, 8])
def test_prompts_are_scored_beside_padding_rows(min_rows: int) -> None:
    def results(**settings: Any) -> list[Completion]:
        engine = fake_engine(n_ctx=8 * 100, n_batch=80, n_parallel=8, unified=False, n_ubatch=16, **settings)
        know(engine, TILES)
        params = [greedy(9 + i, ignore_eos=True, logprobs=1, echo=i % 2 == 1) for i in range(7)]
        return engine.generate([[i + 1] * (1 + 5 * i) for i in range(7)], params)

    expected, padded = results(), results(may_pad=True, min_rows=min_rows)
    assert [(r.tokens, r.logprobs) for r in padded] == [(r.tokens, r.logprobs) for r in expected]


@pytest.mark.parametrize(
    ("min_rows", "lengths", "batch"),
    [
        (2, {0: 1}, [0, 0]),
        (2, {0: 1, 1: 1}, [0, 1]),
        (2, {0: 1, 1: 1, 3: 1}, [3, 3, 0, 1]),
        (2, {2: 3, 3: 1}, [3, 3, 2, 2, 2]),
        (8, {0: 1, 1: 1, 2: 1}, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (8, {5: 3}, [5] * 8),
        (8, dict.fromkeys(range(9), 1), [*range(9)]),
    ],
)
def test_rows_are_padded_to_the_number_that_is_computed_together_at_least(
    min_rows: int, lengths: dict[int, int], batch: list[int]
) -> None:
    """`lengths`: {seq_id: tokens}, 1 for a decode row, more for a row with drafts."""
    rows: list[BatchEntry] = [(PaddingRow(seq_id, 5), n) for seq_id, n in lengths.items()]
    entries = with_min_rows(rows, [], ubatch_tokens=16, min_rows=min_rows)
    assert [entry.seq_id for entry, n in entries for _ in range(n)] == batch
    sizes = [len(places) for places in ubatches(batch, 16)]
    assert min(sizes) >= min_rows


@pytest.mark.parametrize(
    ("lengths", "is_together"),
    [
        ([128] * 16, True),
        ([128] * 15 + [60], True),
        ([600, 600], True),
        ([20, 900, 130, 300], False),
        ([500, 40], False),
    ],
)
def test_on_a_gpu_neighbouring_prompts_are_computed_together_if_that_takes_fewer_ubatches(
    lengths: list[int], is_together: bool
) -> None:
    prompts: list[BatchEntry] = [(PaddingRow(i), n) for i, n in enumerate(lengths)]
    batch = in_batch_order([], list(prompts), gpu_ubatch=512)
    assert batch == (prompts if is_together else prompts[::-1])

    def n_ubatches(batch: list[BatchEntry]) -> int:
        return len(ubatches([entry.seq_id for entry, n in batch for _ in range(n)], 512))

    assert n_ubatches(batch) == min(n_ubatches(prompts), n_ubatches(prompts[::-1]))
