"""Pauses grow to their maximum, and what fails for days still has one."""

from __future__ import annotations

from itertools import islice

from cppbatch.cluster.rules import ScalingRule
from cppbatch.retries import Pauses, RestartPauses


def test_each_pause_is_twice_the_one_before_up_to_the_maximum() -> None:
    pauses = Pauses(0.5, 3.0)
    assert [pauses.after(n) for n in (1, 2, 3, 4, 5000)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert list(islice(pauses, 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_two_thousand_failures_in_a_row_are_followed_by_another_attempt() -> None:
    rule, crashes = ScalingRule(min_workers=1, max_workers=2, n_parallel=4, downscale_delay=9), RestartPauses()
    assert {rule.not_started(0.0) for _ in range(2000)} == {30.0, 60.0, 120.0, 240.0, 480.0, 600.0}
    assert max(crashes.next(0.1) for _ in range(2000)) == 30.0
