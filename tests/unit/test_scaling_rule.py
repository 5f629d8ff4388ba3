"""When a worker is started, and when one is drained, for given loads and times; nothing runs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cppbatch.cluster.rules import Decision, Load, ScalingRule
from tests.support.randomised import randomised

N_PARALLEL = 16
DELAY = 60.0
IDLE = Load(0, 0, 0.0)


class Change(NamedTuple):
    at: float
    decision: Decision


class Simulation:
    """Workers that load in `load_s` seconds, and a rule that looks every half second. Each computes `capacity` requests
    at once, the others wait from their arrival on."""

    def __init__(self, most: int = 3, least: int = 1, capacity: int = N_PARALLEL, load_s: float = 3.0) -> None:
        self.rule = ScalingRule(min_workers=least, max_workers=most, n_parallel=N_PARALLEL, downscale_delay=DELAY)
        self.running, self.capacity, self.load_s = least, capacity, load_s
        self.now = 0.0
        self.changes: list[Change] = []
        self._queued_at: float | None = None

    def run(self, seconds: float, in_flight: int) -> list[Change]:
        """The same number of unfinished requests all the time: a new one comes as soon as one ends."""
        first, end = len(self.changes), self.now + seconds
        while self.now < end:
            waiting = max(0, in_flight - self.running * self.capacity)
            self._queued_at = (self.now if self._queued_at is None else self._queued_at) if waiting else None
            wait = 0.0 if self._queued_at is None else self.now - self._queued_at
            decision = self.rule.decide(self.now, Load(in_flight, waiting, wait), self.running)
            if decision:
                self.changes.append(Change(self.now, decision))
            if decision == "start":
                self.now += self.load_s
                self.running += 1
                self.rule.started()
            elif decision == "drain":
                self.running -= 1
            self.now += 0.5
        return self.changes[first:]


def test_a_load_that_the_workers_compute_changes_nothing() -> None:
    assert Simulation().run(600, in_flight=N_PARALLEL) == []


def test_a_long_queue_starts_a_worker_after_two_seconds_and_a_short_one_after_five() -> None:
    assert Simulation(most=2).run(60, in_flight=N_PARALLEL + 9) == [Change(2.0, "start")]
    assert Simulation(most=2).run(60, in_flight=N_PARALLEL + 1) == [Change(5.0, "start")]


def test_a_queue_that_empties_in_between_starts_nothing() -> None:
    simulation = Simulation()
    for _ in range(20):
        assert simulation.run(1.5, in_flight=100) == []
        assert simulation.run(0.5, in_flight=N_PARALLEL) == []


def test_a_new_worker_is_given_its_time_before_another_one_is_started() -> None:
    first, second = Simulation(load_s=3).run(60, in_flight=1000)
    assert (first.at, second.at) == (2.0, 2.0 + 3.0 + 0.5 + 2.0)


def test_no_more_workers_than_the_maximum_and_no_fewer_than_the_minimum() -> None:
    simulation = Simulation(most=4, least=2)
    simulation.run(600, in_flight=10_000)
    assert simulation.running == 4
    simulation.run(3600, in_flight=0)
    assert simulation.running == 2


def test_workers_that_are_not_needed_end_one_after_the_other() -> None:
    simulation = Simulation()
    simulation.run(60, in_flight=1000)
    began = simulation.now
    first, second = simulation.run(600, in_flight=0)
    assert (first.decision, second.decision) == ("drain", "drain")
    assert first.at - began == pytest.approx(DELAY, abs=0.6)
    assert second.at - first.at == pytest.approx(DELAY, abs=0.6)


def test_a_pause_between_two_bursts_ends_no_worker() -> None:
    simulation = Simulation(most=2)
    simulation.run(30, in_flight=100)
    for _ in range(10):
        assert simulation.run(DELAY - 5, in_flight=0) == []
        assert simulation.run(5, in_flight=100) == []


@randomised(
    ring=30,
    nightly=100,
    soak=1000,
    in_flight=st.integers(0, 200),
    capacity=st.integers(1, N_PARALLEL),
    earlier=st.integers(0, 200),
    most=st.integers(2, 6),
)
def test_a_steady_load_never_makes_the_number_go_up_and_down(
    in_flight: int, capacity: int, earlier: int, most: int
) -> None:
    simulation = Simulation(most=most, capacity=capacity)
    simulation.run(300, in_flight=earlier)
    simulation.run(1200, in_flight=in_flight)
    assert len({change.decision for change in simulation.run(3600, in_flight=in_flight)}) == 0


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 100)), max_size=30), st.integers(1, 3))
def test_the_delay_separates_a_start_and_a_drain(phases: list[tuple[int, int]], least: int) -> None:
    simulation = Simulation(most=4, least=least)
    for seconds, in_flight in phases:
        simulation.run(seconds, in_flight)
        assert least <= simulation.running <= 4
    for before, after in zip(simulation.changes, simulation.changes[1:], strict=False):
        if after.decision == "drain":
            assert after.at - before.at >= DELAY


def test_a_failed_start_is_retried_with_growing_delays() -> None:
    rule = ScalingRule(min_workers=1, max_workers=2, n_parallel=N_PARALLEL, downscale_delay=DELAY)
    load, attempts = Load(100, 84, 9.0), []
    for second in range(1500):
        if rule.decide(float(second), load, 1) == "start":
            attempts.append(second)
            rule.not_started(float(second))
    assert attempts == [2, 32, 92, 212, 452, 932]
    rule.started()
    assert rule.not_started(0.0) == 30.0
    assert rule.decide(10.0, IDLE, 1) is None
