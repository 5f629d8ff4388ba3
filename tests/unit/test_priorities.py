"""Which requests are first, which are preempted, which time out, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason, GenerationEvent, InvalidRequest
from cppbatch.engine import core as core_module
from cppbatch.engine import input_processor
from cppbatch.errors import QueueFull
from tests.support.fakes import context_of, drain, endless, fake_engine, reference, run_steps, tokens_of
from tests.support.virtual_time import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(now=100, tick=1e-6)
    monkeypatch.setattr(core_module, "perf_counter", clock)
    monkeypatch.setattr(input_processor, "perf_counter", clock)
    return clock


def in_order_of_end(engine: BatchInferenceEngine) -> list[str]:
    return [event.request_id for event in drain(engine) if event.finish_reason]


def ends(events: list[GenerationEvent]) -> dict[str, FinishReason]:
    return {event.request_id: event.finish_reason for event in events if event.finish_reason}


def test_a_lower_number_runs_first_and_equals_in_order_of_arrival() -> None:
    engine = fake_engine(n_parallel=1)
    for name, priority in (("b1", 0), ("c1", 5), ("a1", -5), ("b2", 0), ("a2", -5), ("c2", 5)):
        engine.add_request([1, 2], endless(2), request_id=name, priority=priority)
    assert in_order_of_end(engine) == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_a_running_request_is_preempted_for_one_of_higher_priority_and_keeps_its_text() -> None:
    engine = fake_engine(n_parallel=1)
    engine.add_request([1, 2, 3], endless(20), request_id="background", priority=1)
    events = run_steps(engine, 5)
    engine.add_request([4, 5, 6], endless(3), request_id="urgent", priority=0)
    events += drain(engine)
    assert list(ends(events)) == ["urgent", "background"]
    tokens = tokens_of(events, "background")
    assert tokens == reference([1, 2, 3], endless(20))[0]
    assert engine.stats().swaps == 1


def test_cells_are_freed_for_a_higher_priority_but_no_more_than_needed() -> None:
    engine = fake_engine(n_ctx=64, n_parallel=4)
    for name in ("x", "y"):
        engine.add_request([1] * 20, endless(10), request_id=name, priority=1)
    engine.step()
    engine.add_request([2] * 30, endless(4), request_id="urgent")
    drain_some = run_steps(engine, 3)
    assert engine.stats().running == 2
    assert list(ends(drain_some + drain(engine))) == ["urgent", "x", "y"]


def test_no_sequence_is_preempted_for_an_equal_priority() -> None:
    engine = fake_engine(n_parallel=1)
    engine.add_request([1, 2, 3], endless(20), request_id="first")
    engine.step()
    engine.add_request([4, 5, 6], endless(3), request_id="second")
    assert in_order_of_end(engine) == ["first", "second"]
    assert (engine.stats().swaps, engine.stats().recomputes) == (0, 0)


def test_a_higher_priority_that_would_not_fit_even_then_preempts_no_sequence() -> None:
    engine = fake_engine(n_ctx=64, n_parallel=4)
    engine.add_request([1] * 40, endless(20), request_id="first", priority=0)
    engine.add_request([2] * 4, endless(9), request_id="low", priority=1)
    engine.step()
    engine.add_request([3] * 40, endless(4), request_id="second", priority=0)
    engine.step()
    assert engine.stats().running == 2
    assert engine.stats().swaps + engine.stats().recomputes == 0
    drain(engine)


def test_waiting_makes_up_for_priority_so_that_no_request_starves(clock: Clock) -> None:
    engine = fake_engine(n_parallel=1)
    engine.add_request([9], endless(2), request_id="running")
    engine.step()
    engine.add_request([1], endless(1), request_id="patient", priority=3)
    clock.now += 31
    engine.add_request([2], endless(1), request_id="late", priority=0)
    assert in_order_of_end(engine) == ["running", "patient", "late"]


def test_a_request_that_gained_rank_by_waiting_is_not_preempted_for_the_next_arrival(clock: Clock) -> None:
    engine = fake_engine(n_parallel=1)
    engine.add_request([1], endless(9), request_id="patient", priority=3)
    clock.now += 31
    engine.step()
    engine.add_request([2], endless(1), request_id="late", priority=0)
    assert in_order_of_end(engine) == ["patient", "late"]


def test_when_cells_run_out_the_lowest_priority_gives_up_its_own() -> None:
    engine = fake_engine(n_ctx=64, n_parallel=4)
    for name, priority in (("low", 1), ("a", 0), ("b", 0)):
        engine.add_request([len(name)], endless(28), request_id=name, priority=priority)
    assert in_order_of_end(engine)[-1] == "low"
    assert engine.stats().swaps == 1


@pytest.mark.parametrize("priority", [-101, 101, 0.5, "high", True])
def test_a_priority_out_of_range_is_refused(priority: Any) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        fake_engine().add_request([1], priority=priority)


def test_a_running_request_ends_with_its_text_so_far_at_its_timeout(clock: Clock) -> None:
    engine = fake_engine()
    engine.add_request([1, 2, 3], endless(30), timeout=10)
    events = run_steps(engine, 4)
    clock.now += 10
    events += drain(engine)
    assert events[-1].finish_reason is FinishReason.TIMEOUT
    tokens = [token for event in events for token in event.tokens]
    assert tokens == reference([1, 2, 3], endless(4))[0]
    assert context_of(engine).n_used == 0


@pytest.mark.parametrize("limit", ["timeout", "queue_timeout"])
def test_a_request_that_never_ran_ends_too(clock: Clock, limit: str) -> None:
    limits: dict[str, Any] = {limit: 5}
    engine = fake_engine(n_parallel=1)
    engine.add_request([1], endless(30), request_id="running")
    engine.step()
    engine.add_request([2], endless(1), request_id="waiting", **limits)
    clock.now += 4
    assert "waiting" not in ends(engine.step())
    clock.now += 1
    assert ends(engine.step()) == {"waiting": FinishReason.TIMEOUT}
    assert engine.stats().finished == {"timeout": 1}
    drain(engine)


def test_the_queue_timeout_is_over_once_a_request_has_run(clock: Clock) -> None:
    engine = fake_engine(n_parallel=1)
    engine.add_request([1], endless(9), request_id="background", priority=1, queue_timeout=5)
    engine.step()
    engine.add_request([2], endless(3), request_id="urgent")
    engine.step()
    clock.now += 100
    assert set(ends(drain(engine)).values()) == {FinishReason.LENGTH}


def test_requests_that_end_in_time_leave_no_timeouts(clock: Clock) -> None:
    engine = fake_engine()
    for i in range(5):
        engine.add_request([i], endless(2), timeout=1000, queue_timeout=1000)
    drain(engine)
    assert not engine.core.scheduler._timed
    clock.now += 2000
    engine.add_request([1], endless(1))
    assert set(ends(drain(engine)).values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("limit", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "5", True])
def test_an_invalid_timeout_is_refused(limit: str, seconds: Any) -> None:
    with pytest.raises(InvalidRequest, match=limit):
        fake_engine().add_request([1], **{limit: seconds})


def test_a_full_queue_refuses_at_once_with_a_retry_after() -> None:
    """Before the first step too, which will admit one of the three."""
    engine = fake_engine(n_parallel=1, max_queue=2)
    names = [engine.add_request([1], endless(2)) for _ in range(3)]
    with pytest.raises(QueueFull, match=r"the queue is full: 2 requests.*--max-queue.*try again in \d+ s") as refused:
        engine.add_request([1], endless(2))
    assert 1 <= refused.value.retry_after <= 60
    engine.cancel(names[2])
    engine.add_request([1], endless(2))
    assert len(in_order_of_end(engine)) == 4


def test_generate_takes_any_number_of_prompts() -> None:
    engine = fake_engine(n_parallel=2, max_queue=1)
    assert len(engine.generate([[i] for i in range(20)], endless(2))) == 20


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_a_request_that_shares_its_prefix_with_those_it_preempts_does_not_wait_for_them(n_parallel: int) -> None:
    engine = fake_engine(n_ctx=256, n_batch=64, n_parallel=n_parallel, sharing="cells")
    prompt = [1] * 40
    for i in range(n_parallel):
        engine.add_request([*prompt, i], endless(60), request_id=f"low-{i}", priority=1)
    events = run_steps(engine, 4)
    engine.add_request([*prompt, 9], endless(3), request_id="urgent")
    events += run_steps(engine, 4)
    assert "urgent" in ends(events)
    events += drain(engine)
    for i in range(n_parallel):
        tokens = tokens_of(events, f"low-{i}")
        assert tokens == reference([*prompt, i], endless(60))[0]


def test_no_request_waits_for_a_prefix_that_a_lower_priority_is_computing() -> None:
    engine = fake_engine(n_ctx=512, n_batch=8, n_parallel=3, sharing="cells")
    engine.add_request([1] * 120, endless(2), request_id="low", priority=5)
    engine.step()
    engine.add_request([1] * 110 + [2], endless(2), request_id="urgent")
    assert in_order_of_end(engine)[0] == "urgent"
