"""The accounting of shared cells: which are used, which are shared, and which become free when a sequence ends."""

from __future__ import annotations

import itertools
from itertools import permutations

import pytest
from hypothesis import strategies as st

from cppbatch.engine.cells import Cells, Span, n_held, n_shared
from tests.support.randomised import randomised


def length(tip: Span | None) -> int:
    return tip.stop if tip else 0


def test_a_sequence_that_grows_alone_stays_one_span() -> None:
    cells = Cells()
    tip = cells.grow(cells.grow(None, 5), 3)
    assert (tip.parent, tip.start, tip.stop) == (None, 0, 8)
    assert (cells.n_used, n_shared(tip)) == (8, 0)


def test_a_sequence_that_grows_by_nothing_uses_nothing() -> None:
    cells = Cells()
    tip = cells.grow(cells.grow(cells.grow(None, 0), 4), 0)
    assert (cells.n_used, length(tip), n_held([tip])) == (4, 4, 4)


@pytest.mark.parametrize("n", [1, 3, 7, 8], ids=["first", "inside", "all but one", "all"])
def test_sharing_takes_no_cells(n: int) -> None:
    cells = Cells()
    tip = cells.grow(None, 8)
    other = cells.share(tip, n)
    assert (cells.n_used, length(tip), length(other)) == (8, 8, n)
    assert (n_shared(tip), n_shared(other), n_held([tip, other]), n_held([other])) == (n, n, 8, n)


def test_sharing_no_tokens_gives_no_cells() -> None:
    cells = Cells()
    tip = cells.grow(None, 8)
    assert cells.share(tip, 0) is None
    assert cells.share(None, 0) is None
    assert (n_shared(tip), cells.n_used) == (0, 8)


def test_a_prefix_can_be_shared_on_from_one_that_shares_it() -> None:
    cells = Cells()
    first = cells.grow(None, 8)
    second = cells.grow(cells.share(first, 6), 4)
    third = cells.share(second, 8)
    fourth = cells.share(third, 2)
    assert cells.n_used == n_held([first, second, third, fourth]) == 12
    assert [length(tip) for tip in (first, second, third, fourth)] == [8, 10, 8, 2]
    assert [n_shared(tip) for tip in (first, second, third, fourth)] == [6, 8, 8, 2]


@pytest.mark.parametrize("n", [3, 8], ids=["inside", "at the end"])
def test_chains_that_share_a_prefix_grow_independently(n: int) -> None:
    cells = Cells()
    tip = cells.grow(None, 8)
    other = cells.share(tip, n)
    tip, other = cells.grow(tip, 5), cells.grow(other, 2)
    assert (cells.n_used, length(tip), length(other)) == (15, 13, n + 2)
    assert (n_shared(tip), n_shared(other)) == (n, n)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_cell_is_free_when_its_last_holder_leaves_in_any_order(order: tuple[int, ...]) -> None:
    cells = Cells()
    first = cells.grow(None, 10)
    second, third = cells.grow(cells.share(first, 6), 3), cells.share(first, 10)
    tips = {0: first, 1: second, 2: third, 3: cells.share(second, 2)}
    for leaving in order:
        cells.free(tips.pop(leaving))
        assert cells.n_used == n_held(tips.values())
    assert cells.n_used == 0


def test_sharing_up_to_where_two_have_parted_cuts_nothing_anew() -> None:
    cells = Cells()
    tip = cells.grow(None, 8)
    second = cells.grow(cells.share(tip, 6), 3)
    assert cells.share(second, 6) is second.parent
    assert n_shared(second) == 6


def test_a_chain_with_one_holder_left_is_not_shared_and_keeps_growing() -> None:
    cells = Cells()
    tip = cells.grow(None, 8)
    other = cells.share(tip, 5)
    cells.free(tip)
    assert (cells.n_used, n_shared(other)) == (5, 0)
    assert cells.grow(other, 2) is other
    assert cells.n_used == 7


def test_freeing_no_cells_changes_nothing() -> None:
    cells = Cells()
    cells.grow(None, 3)
    cells.free(None)
    assert cells.n_used == 3


@pytest.mark.parametrize("n", [0, 1, 5, 8])
def test_cutting_frees_the_cells_after_the_cut(n: int) -> None:
    cells = Cells()
    tip = cells.cut(cells.grow(None, 8), n)
    assert (cells.n_used, length(tip), n_shared(tip)) == (n, n, 0)


@pytest.mark.parametrize("n", [0, 3, 5, 7])
def test_cutting_leaves_others_the_cells_that_they_hold_too(n: int) -> None:
    cells = Cells()
    tip = cells.grow(None, 8)
    other = cells.share(tip, 5)
    tip_cut = cells.cut(tip, n)
    assert (cells.n_used, length(tip_cut), length(other)) == (max(5, n), n, 5)
    assert n_shared(tip_cut) == n_shared(other) == min(5, n)


def test_cells_held_together_count_once() -> None:
    cells = Cells()
    tip = cells.grow(None, 8)
    others = [cells.grow(cells.share(tip, 8), i) for i in (1, 2, 3)]
    assert n_held([tip, *others]) == 14
    assert n_held(others[:2]) == 11
    assert n_held([tip, tip, None]) == 8
    assert n_held([]) == 0


ACTIONS = st.lists(
    st.tuples(st.sampled_from(("grow", "grow", "share", "share", "free", "cut")), st.integers(0, 9), st.integers(0, 9)),
    max_size=40,
)


@randomised(ring=150, soak=500, actions=ACTIONS)
def test_in_any_order_the_accounting_equals_that_of_numbered_cells(actions: list[tuple[str, int, int]]) -> None:
    cells, fresh = Cells(), itertools.count()
    tips: list[Span | None] = [None]
    model: list[list[int]] = [[]]
    for action, which, n in actions:
        i = which % len(tips)
        keep = min(n, len(model[i]))
        match action:
            case "grow":
                tips[i] = cells.grow(tips[i], n)
                model[i] = model[i] + list(itertools.islice(fresh, n))
            case "share":
                tips.append(cells.share(tips[i], keep))
                model.append(model[i][:keep])
            case "free":
                cells.free(tips[i])
                tips[i], model[i] = None, []
            case "cut":
                tips[i] = cells.cut(tips[i], keep)
                model[i] = model[i][:keep]
        check(cells, tips, model)


def check(cells: Cells, tips: list[Span | None], model: list[list[int]]) -> None:
    assert cells.n_used == n_held(tips) == len(set().union(*model))
    for i, (tip, numbers) in enumerate(zip(tips, model, strict=True)):
        others = set().union(*model[:i], *model[i + 1 :])
        shared = len(list(itertools.takewhile(others.__contains__, numbers)))
        assert (length(tip), n_shared(tip)) == (len(numbers), shared)
        assert n_held(tips[: i + 1]) == len(set().union(*model[: i + 1]))


def test_a_chain_is_as_short_as_its_current_holders_allow() -> None:
    cells = Cells()
    tip = cells.grow(None, 100)
    for n in range(1, 99):
        cells.free(cells.share(tip, n))
    assert n_held([tip]) == cells.n_used == 100
    assert tip.parent is None
