"""Which states are saved to host memory, and which are computed again (`SaveCost`)."""

from __future__ import annotations

import pytest

from cppbatch.engine.kv.save_cost import SaveCost

LATER = 0.1  # the probability that a prefix is reused that has not been reused yet


@pytest.mark.parametrize(
    ("save_ms", "compute_ms", "chance", "is_worth"),
    [
        (6, 770, LATER, True),  # a small model on a CPU, 1,000 tokens
        (33, 87, LATER, False),  # 8B on an H100
        (33, 87, 1.0, True),
        (200, 87, 1.0, False),  # cells between those of other sequences
        (250, 870, LATER, False),
        (1.5, 1, LATER, True),  # no step notices it
    ],
)
def test_a_state_is_saved_if_that_and_restoring_it_takes_less_than_computing_it(
    save_ms: float, compute_ms: float, chance: float, is_worth: bool
) -> None:
    cost = SaveCost(lambda: compute_ms / 1e6)
    cost.observe(1000, save_ms / 1000)
    assert cost.is_worth(1000, chance) is is_worth


def test_states_are_saved_until_both_times_are_known() -> None:
    assert SaveCost(lambda: 0.001).is_worth(1000, LATER)
    cost = SaveCost(lambda: 0.0)
    cost.observe(1000, 1.0)
    assert cost.is_worth(1000, LATER)


def test_now_and_then_a_save_finds_out_whether_it_has_become_cheaper() -> None:
    cost = SaveCost(lambda: 87e-6)
    cost.observe(1000, 0.2)
    decisions = [cost.is_worth(1000, 1.0) for _ in range(64)]
    assert decisions.count(True) == 2
    for _ in range(20):
        cost.observe(1000, 0.02)
    assert cost.is_worth(1000, 1.0)
