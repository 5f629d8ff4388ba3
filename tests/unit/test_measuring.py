"""Variants are measured alternately and compared turn by turn."""

from __future__ import annotations

from measuring import Comparison

from cppbatch.bench.report import Column, Spread, order_of_turn


def compared() -> Comparison:
    """The machine is half as fast in the second turn; one variant is always 1.5 times as fast as the other."""
    speeds = {("fast", 0): 90.0, ("slow", 0): 60.0, ("fast", 1): 45.0, ("slow", 1): 30.0}
    return Comparison(["fast", "slow"]).measure(2, lambda name, turn: {"speed": speeds[name, turn], "rest": None})


def test_every_other_turn_has_the_reverse_order_and_uncounted_turns_come_first() -> None:
    measured: list[tuple[str, int]] = []

    def measure(name: str, turn: int) -> dict[str, float | None]:
        measured.append((name, turn))
        return {"turn": float(turn)}

    found = Comparison("ab").measure(2, measure, uncounted=1)
    assert measured == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found.values("a", "turn") == [1.0, 2.0]
    assert [order_of_turn("abc", turn) for turn in (0, 1)] == [["a", "b", "c"], ["c", "b", "a"]]


def test_ratios_compare_figures_of_the_same_turn() -> None:
    assert compared().ratio("speed", "fast", "slow") == Spread(1.5, 1.5, 1.5)
    assert compared().median("fast", "speed") == 67.5


def test_tables_have_medians_and_ratios_and_a_dash_for_what_was_not_measured() -> None:
    columns = [Column("speed", "tokens/s", 0), Column("rest", "rest")]
    assert compared().table(columns, {"speed": "ratio"}, base="slow").splitlines()[2:] == [
        "| fast | 68 | - | 1.50 (1.50 to 1.50) |",
        "| slow | 45 | - | 1.00 (1.00 to 1.00) |",
    ]
    assert compared().side_by_side(columns, [("fast", "slow")]) == [
        ["tokens/s", "68", "45", "1.50 (1.50 to 1.50)"],
        ["rest", "-", "-", "-"],
    ]
