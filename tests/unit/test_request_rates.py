"""Rates and slots of API keys, with a clock of the test."""

from __future__ import annotations

from cppbatch.server.auth.keys import Slots
from cppbatch.server.auth.rates import RequestRates
from cppbatch.server.http.limits import Limits
from tests.support.virtual_time import Clock


def test_a_minutes_requests_come_at_once_and_then_evenly() -> None:
    clock = Clock(now=100)
    rates = RequestRates(clock)
    states = [rates.take("a", 30) for _ in range(31)]
    assert [taken for taken, _ in states] == [True] * 30 + [False]
    assert [state.remaining for _, state in states[:3]] == [29, 28, 27]
    assert states[-1][1] == (30, 0, 2.0, 60.0)
    assert rates.take("b", 30)[0]
    clock.now += 1.9
    assert not rates.take("a", 30)[0]
    clock.now += 0.1
    assert [rates.take("a", 30)[0] for _ in range(2)] == [True, False]
    clock.now += 1000
    assert sum(rates.take("a", 30)[0] for _ in range(100)) == 30


def test_the_lines_of_batches_leave_half_of_the_rate_to_others() -> None:
    clock = Clock(now=100)
    rates = RequestRates(clock)
    assert sum(rates.take_for_batch("a", 10)[0] for _ in range(20)) == 5
    taken, state = rates.take_for_batch("a", 10)
    assert (taken, round(state.wait, 6)) == (False, 6)
    assert sum(rates.take("a", 10)[0] for _ in range(20)) == 5
    clock.now += 36  # six requests later
    assert [rates.take_for_batch("a", 10)[0] for _ in range(2)] == [True, False]


def test_the_lines_of_a_key_with_one_request_per_minute_run() -> None:
    clock = Clock(now=100)
    rates = RequestRates(clock)
    assert rates.take_for_batch("a", 1)[0]
    clock.now += rates.take_for_batch("a", 1)[1].wait
    assert rates.take_for_batch("a", 1)[0]


def test_the_lines_of_batches_leave_half_of_the_slots_to_others() -> None:
    slots = Slots(Limits())
    assert [slots.take_for_batch("a", 5) for _ in range(3)] == [True, True, False]
    with slots.one("a", 5), slots.one("a", 5), slots.one("a", 5):
        slots.give_back("a")
        with slots.one("a", 5):
            assert not slots.take_for_batch("a", 5)
    slots.give_back("a")
    assert slots.take_for_batch("a", 1)
    slots.give_back("a")
    assert not slots._of
    assert not slots._lines_of
