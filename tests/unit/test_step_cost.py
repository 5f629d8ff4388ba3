"""What steps cost is learned from steps, and padding rows are added only where they make a step faster."""

from __future__ import annotations

import random

import pytest

from cppbatch.engine.step_cost import StepCost, whole_tiles

TILED = {1: 5.1, 2: 8.6, 3: 11.1, 4: 10.2, 5: 13.1, 6: 15.6, 7: 17.8, 8: 13.3, 9: 17.2, 10: 21.4, 11: 22.5, 12: 19.6,
         13: 23.0, 14: 26.4, 15: 29.8, 16: 20.7}  # fmt: skip
"""Milliseconds by rows: Q4_0 on two EPYC cores (DESIGN: tiles of 4 and 16)."""


def settled(n: int, ms: dict[int, float], *, most: int = 16, steps: int = 200) -> list[int]:
    """The rows computed in each of the last 100 steps if `n` are requested, on a machine with these times."""
    cost, noise, computed = StepCost(), random.Random(n), []
    for _ in range(steps):
        rows = cost.rows_to_compute(n, most)
        cost.observe_rows((rows,), ms[rows] / 1000 * noise.uniform(0.97, 1.06))
        computed.append(rows)
    return computed[-100:]


@pytest.mark.parametrize(("n", "best"), [(3, 4), (6, 8), (7, 8), (10, 12), (11, 12), (13, 16), (14, 16), (15, 16)])
def test_rows_are_padded_to_the_tile_that_is_faster(n: int, best: int) -> None:
    computed = settled(n, TILED)
    assert computed.count(best) >= 96
    assert set(computed) <= {n, best, 12, 16}


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8, 9, 12, 16])
def test_rows_that_are_as_fast_alone_are_not_padded(n: int) -> None:
    assert settled(n, TILED).count(n) >= 96


@pytest.mark.parametrize("n", range(1, 17))
def test_where_every_row_pays_for_itself_nothing_is_padded(n: int) -> None:
    assert settled(n, {rows: 5.0 + 3.0 * rows for rows in range(1, 17)}).count(n) >= 96


def test_on_a_flat_curve_padding_is_never_even_tried() -> None:
    cost = StepCost()
    for rows in (1, 2, 3, 4, 3, 2, 1, 5, 9, 15):
        for _ in range(4):
            cost.observe_rows((rows,), 0.010 + 0.0001 * rows)
    assert [cost.rows_to_compute(15, 16) for _ in range(500)] == [15] * 500


def test_padding_is_limited_by_what_is_possible() -> None:
    assert {StepCost().rows_to_compute(15, 15) for _ in range(200)} == {15}


def test_longer_sequences_change_the_level_and_not_which_rows_are_faster() -> None:
    cost = StepCost()
    for step in range(1, 600):
        rows = cost.rows_to_compute(15, 16)
        cost.observe_rows((rows,), TILED[rows] * (1 + step / 200))
    assert cost.rows_to_compute(15, 16) == 16
    assert cost.rows_s((16,)) == pytest.approx(TILED[16] * 4, rel=0.05)


def test_a_disturbed_step_does_not_decide() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe_rows((15,), 0.030)
        cost.observe_rows((16,), 0.021)
    cost.observe_rows((16,), 1.0)
    assert cost.rows_to_compute(15, 16) == 16


def test_a_disturbed_first_step_does_not_mark_a_number_of_rows_as_slow_permanently() -> None:
    cost = StepCost()
    cost.observe_prompt(256, 0.256)
    for _ in range(4):
        cost.observe_rows((1,), 0.010)
    cost.observe_rows((8,), 0.120)
    assert cost.rows_s((8,)) == pytest.approx(0.017), "what prompt tokens cost beside the known row"
    assert cost.rows_s((4,)) == pytest.approx(0.013)
    for _ in range(3):
        cost.observe_rows((8,), 0.018)
    assert cost.rows_s((8,)) == pytest.approx(0.018)


def test_a_disturbed_step_does_not_make_the_next_new_number_of_rows_look_fast() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe_rows((4,), 0.080)
    cost.observe_rows((4,), 0.400)
    for _ in range(4):
        cost.observe_rows((8,), 0.120)
    assert cost.relative((8,)) / cost.relative((4,)) == pytest.approx(1.5, rel=0.03)


def test_a_number_of_rows_that_is_seldom_computed_does_not_change_the_level() -> None:
    """One row takes longer than before; most steps have four."""
    cost = StepCost()
    for _ in range(20):
        cost.observe_rows((1,), 0.030)
        cost.observe_rows((4,), 0.080)
    for _ in range(10):
        for _ in range(40):
            cost.observe_rows((4,), 0.080)
        cost.observe_rows((1,), 0.040)
        assert cost.rows_s((4,)) == pytest.approx(0.080, rel=0.015)
    assert cost.rows_s((1,)) == pytest.approx(0.040, rel=0.03)


def test_a_number_of_rows_that_is_slow_every_time_is_recorded_as_slow() -> None:
    cost = StepCost()
    cost.observe_prompt(256, 0.256)
    for _ in range(4):
        cost.observe_rows((1,), 0.010)
    for _ in range(20):
        cost.observe_rows((8,), 0.060)
        cost.observe_rows((1,), 0.010)
    assert cost.rows_s((8,)) == pytest.approx(0.060, rel=0.2)


def test_unknown_numbers_of_rows_are_between_the_known_ones() -> None:
    cost = StepCost()
    cost.seed([(4, 0.010), (8, 0.030)])
    assert [cost.rows_s((n,)) for n in (1, 4, 6, 8)] == pytest.approx([0.010, 0.010, 0.020, 0.030])
    assert cost.rows_s((4, 6)) == pytest.approx(0.030)


def test_a_step_of_several_groups_corrects_the_one_that_is_hardly_known() -> None:
    cost = StepCost()
    cost.seed([(16, 0.030)])
    cost.observe_rows((7,), 0.010)
    for _ in range(3):
        cost.observe_rows((16, 7), 0.050)
    assert cost.rows_s((16,)) == pytest.approx(0.030)
    assert cost.rows_s((7,)) == pytest.approx(0.020, rel=0.2)


def test_more_rows_than_were_ever_measured_cost_as_little_as_the_last_ones_of_a_gpu() -> None:
    cost = StepCost()
    cost.observe_prompt(64, 0.010)
    cost.seed([(1, 0.0013), (16, 0.0032), (32, 0.0040)])
    assert cost.rows_s((48,)) == pytest.approx(0.0048)


def test_more_rows_than_were_ever_measured_cost_as_much_more_as_prompt_tokens() -> None:
    cost = StepCost()
    cost.seed([(4, 0.010)])
    cost.observe_prompt(16, 0.008)
    assert cost.rows_s((20,)) == pytest.approx(0.010 + 0.008)


def test_groups_of_rows_are_joined_where_that_is_faster() -> None:
    cost = StepCost()
    cost.seed((n, ms / 1000) for n, ms in TILED.items())
    assert cost.is_worth_joining(7, 1, 8), "16 rows take 20.7 ms, 7 and 8 apart 31.1"
    assert not cost.is_worth_joining(1, 8, 1), "two single rows take 10.2 ms, ten 21.4"


@pytest.mark.parametrize(("ms", "fitting"), [(10, 10), (31, 31), (64, 160), (200, 500), (1000, 2500)])
def test_how_many_prompt_tokens_fit_depends_on_what_a_piece_of_that_size_costs(ms: int, fitting: int) -> None:
    cost = StepCost()
    for n, token_ms in ((8, 1.0), (16, 1.0), (32, 1.0), (64, 0.5), (128, 0.4), (256, 0.4), (512, 0.4)):
        cost.observe_prompt(n, n * token_ms / 1000)
    assert cost.prompt_tokens_in(ms / 1000) == pytest.approx(fitting, abs=1)


def test_pieces_are_whole_tiles() -> None:
    assert [whole_tiles(n) for n in (1, 3, 4, 7, 15, 16, 31, 100)] == [1, 3, 4, 4, 12, 16, 16, 96]


def test_whole_tiles_cost_no_more_than_the_prompt_tokens_that_they_have_more_than_any_smaller_number() -> None:
    """5 rows are a tile and a single row, which says nothing about two tiles."""
    cost = StepCost()
    cost.seed([(1, 0.014), (4, 0.033), (5, 0.056), (64, 1.0)])
    cost.observe_prompt(7, 7 * 0.004)
    assert cost.rows_s([8]) == pytest.approx(0.014 + 7 * 0.004)
    assert cost.rows_s([7]) > 0.056
