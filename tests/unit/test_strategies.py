"""What each strategy promises: which requests share a step, when they join, and what padding costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.bench.prompts import Lengths
from cppbatch.bench.strategies import STRATEGIES
from cppbatch.bench.strategies.compare_strategies import OfflineWorkload, TimedRequest, make_schedulers, run_workload
from cppbatch.bench.strategies.schedulers import (
    ConcurrentScheduler,
    SequentialScheduler,
    StaticScheduler,
    padding_tokens,
    round_up,
)
from cppbatch.engine.scheduler import Scheduler
from cppbatch.errors import ConfigError
from tests.support.fakes import N_VOCAB, context_of, drain, fake_engine, greedy, n_computed, reference
from tests.support.virtual_time import Clock

Policy = Callable[..., Scheduler]

PROMPTS, NEW = [3, 9, 1, 14, 2, 20, 5, 7, 11, 4], [5, 1, 9, 2, 17, 3, 8, 4, 12, 6]

KNOWN = make_schedulers(max_wait_s=0.0, bucket=8)

LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])


def engine_with(
    policy: Policy, *, n_parallel: int = 4, n_batch: int = 32, unified: bool = True
) -> BatchInferenceEngine:
    n_ctx = n_parallel * 64
    return fake_engine(n_ctx=n_ctx, n_batch=n_batch, n_parallel=n_parallel, unified=unified, policy=policy)


def jobs(prompts: Sequence[int] = PROMPTS, new: Sequence[int] = NEW) -> list[TimedRequest]:
    return [
        TimedRequest(0.0, [(7 * i + 3 * k) % N_VOCAB for k in range(n)], m)
        for i, (n, m) in enumerate(zip(prompts, new, strict=True))
    ]


def add(engine: BatchInferenceEngine, name: str, n_prompt: int, n_new: int) -> str:
    return engine.add_request([1] * n_prompt, greedy(n_new, ignore_eos=True), request_id=name)


def running(engine: BatchInferenceEngine) -> set[str]:
    return {sequence.id for sequence in engine.core.scheduler.running}


# --- the same work with any scheduler -------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_gives_each_request_the_text_it_has_alone(name: str, unified: bool) -> None:
    engine = engine_with(KNOWN[name], unified=unified)
    expected = [reference(job.prompt, greedy(job.n_new, ignore_eos=True))[0] for job in jobs()]
    for _ in range(2):  # the second time with the state that the first has left
        assert run_workload(engine, jobs()).tokens == expected
        engine.core.kv.check()
        assert engine.core.kv.n_used == 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_padding_each_token_is_computed_once(name: str) -> None:
    engine = engine_with(KNOWN[name])
    run_workload(engine, jobs())
    needed = sum(PROMPTS) + sum(NEW) - len(NEW)  # the last token is never computed
    assert (n_computed(engine) == needed) == (name not in ("static-padded", "static-buckets"))


@LAYOUTS
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_cancelled_request_leaves_no_trace(name: str, unified: bool) -> None:
    engine = engine_with(KNOWN[name], unified=unified)
    for i in range(6):
        add(engine, str(i), 5 + i, 8)
    events = []
    for i in (0, 5):
        for _ in range(3):
            events += engine.step()
        assert engine.cancel(str(i))
    events += drain(engine)
    ended = Counter(event.finish_reason.value for event in events if event.finish_reason)
    assert ended == {"length": 4, "cancelled": 2}
    engine.core.kv.check()
    assert engine.core.kv.n_used == 0


# --- sequential and concurrent --------------------------------------------------------------------------------------


def test_sequential_never_has_two_sequences_at_once() -> None:
    engine = engine_with(SequentialScheduler)
    for i, job in enumerate(jobs()):
        engine.add_request(job.prompt, greedy(job.n_new, ignore_eos=True), request_id=str(i))
    ended = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
        assert len(engine.core.scheduler.running) <= 1
    assert all(len(step) == 1 for step in context_of(engine).steps)
    assert ended == [str(i) for i in range(len(PROMPTS))]


def test_concurrent_runs_many_and_computes_one_a_step() -> None:
    engine = engine_with(ConcurrentScheduler)
    for i in range(4):
        add(engine, str(i), 3, 6)
    engine.step()
    assert running(engine) == {"0", "1", "2", "3"}
    drain(engine)
    assert all(len(step) == 1 for step in context_of(engine).steps)
    assert engine.stats().mean_decode_batch == 1


def test_concurrent_gives_every_request_a_turn_before_any_has_a_second() -> None:
    engine = engine_with(ConcurrentScheduler)
    for i in range(3):
        add(engine, str(i), 3, 6)
    told = [event.request_id for _ in range(7) for event in engine.step()]
    assert told == ["0", "1", "2", "0", "1", "2", "0"]
    add(engine, "3", 3, 6)
    told = [event.request_id for _ in range(5) for event in engine.step()]
    assert told == ["1", "2", "3", "0", "1"]


def test_concurrent_reads_a_prompt_longer_than_a_step_in_turns_too() -> None:
    engine = engine_with(ConcurrentScheduler, n_batch=8)
    add(engine, "long", 20, 2)
    add(engine, "short", 3, 2)
    drain(engine)
    assert [sum(step.values()) for step in context_of(engine).steps] == [8, 3, 8, 1, 4, 1]


# --- static ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [0, 8])
def test_no_request_joins_a_running_batch_and_its_places_stay_taken_until_all_of_it_has_ended(bucket: int) -> None:
    engine = engine_with(partial(StaticScheduler, max_wait_s=0.0, bucket=bucket))
    for name, n_new in {"a": 2, "b": 4, "c": 9}.items():
        add(engine, name, 3, n_new)
    while not engine.core.scheduler.running:
        engine.step()
    for name in "def":
        add(engine, name, 3, 2)
    ended: list[str] = []
    while len(ended) < 3:
        assert running(engine) <= {"a", "b", "c"}
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert ended == ["a", "b", "c"]
    while not engine.core.scheduler.running:
        engine.step()
    assert running(engine) == {"d", "e", "f"}


def test_a_batch_starts_when_it_is_full() -> None:
    clock = Clock()
    engine = engine_with(partial(StaticScheduler, max_wait_s=1e9, clock=clock), n_parallel=3)
    for name in "ab":
        add(engine, name, 3, 2)
        engine.step()
        assert not engine.core.scheduler.running
    for name in "cd":
        add(engine, name, 3, 2)
    engine.step()
    assert running(engine) == {"a", "b", "c"}


def test_a_batch_of_a_length_bucket_has_prompts_of_that_bucket_only() -> None:
    clock = Clock()
    policy = partial(StaticScheduler, max_wait_s=5.0, bucket=8, is_by_length=True, clock=clock)
    engine = engine_with(policy, n_parallel=3)
    for name, n_prompt in {"a": 3, "b": 20, "c": 8, "d": 17, "e": 5, "f": 24}.items():
        add(engine, name, n_prompt, 2)
    engine.step()
    drained = drain_batch(engine)
    assert drained == {"a", "c", "e"}, "up to 8 tokens"
    assert n_computed(engine) == 3 * 8 + 3, "padded to 8, then a token of each"
    assert drain_batch(engine) == {"b", "d", "f"}
    add(engine, "g", 3, 2)
    assert engine.step() == []
    assert not engine.core.scheduler.running, "it is not full"
    clock.now = engine.core.scheduler.waiting[0].arrived_at + 5
    assert drain_batch(engine) == {"g"}


def drain_batch(engine: BatchInferenceEngine) -> set[str]:
    """The names of the next batch's requests; it runs to its end."""
    ended: set[str] = set()
    while not engine.core.scheduler.running:
        ended |= {event.request_id for event in engine.step() if event.finish_reason}
    names = running(engine)
    while not names <= ended:
        ended |= {event.request_id for event in engine.step() if event.finish_reason}
    return names


def test_a_batch_starts_when_its_first_request_has_waited_long_enough() -> None:
    clock = Clock()
    engine = engine_with(partial(StaticScheduler, max_wait_s=5.0, clock=clock))
    add(engine, "a", 3, 3)
    arrived = engine.core.scheduler.waiting[0].arrived_at
    clock.now = arrived + 4.9
    assert engine.step() == []
    add(engine, "b", 3, 3)
    assert engine.step() == []
    assert not engine.core.scheduler.running
    clock.now = arrived + 5.0
    engine.step()
    assert running(engine) == {"a", "b"}


def test_a_batch_decodes_when_all_its_prompts_are_read() -> None:
    engine = engine_with(partial(StaticScheduler, max_wait_s=0.0), n_batch=16, n_parallel=3)
    for name in "abc":
        add(engine, name, 12, 3)
    drain(engine)
    sizes = [sorted(step.values(), reverse=True) for step in context_of(engine).steps]
    assert sizes == [[12, 4], [8, 8], [4], [1, 1, 1], [1, 1, 1]]


def test_padding_fills_prompts_up_to_the_bucket_that_holds_the_longest() -> None:
    assert [round_up(n, 64) for n in (1, 64, 65)] == [64, 64, 128]
    assert padding_tokens([10, 100, 128], 64) == 3 * 128 - 238
    assert padding_tokens([10, 100, 129], 64) == 3 * 192 - 239
    assert padding_tokens([10, 100, 129], 0) == 0


@LAYOUTS
@pytest.mark.parametrize("n_batch", [64, 8])
def test_a_padded_batch_computes_a_rectangle_of_prompts_and_one_of_rows(n_batch: int, unified: bool) -> None:
    engine = engine_with(partial(StaticScheduler, max_wait_s=0.0, bucket=8), n_batch=n_batch, unified=unified)
    prompts, new = [3, 9, 1, 14], [5, 1, 9, 2]
    run_workload(engine, jobs(prompts, new))
    assert n_computed(engine) == 4 * 16 + 4 * (max(new) - 1)
    assert engine.stats().decode_rows == sum(new) - 4  # only those that were requested


# --- what is measured -----------------------------------------------------------------------------------------------


def test_workloads_are_the_same_for_the_same_seed_and_stay_within_their_spans() -> None:
    work = OfflineWorkload(n_requests=200, prompt_tokens=Lengths(4, 32), new_tokens=Lengths(1, 64), rate=10.0, seed=3)
    drawn = work.requests(N_VOCAB)
    assert drawn == work.requests(N_VOCAB)
    assert {len(job.prompt) for job in drawn} <= set(range(4, 33))
    assert {job.n_new for job in drawn} <= set(range(1, 65))
    assert sum(job.n_new < 8 for job in drawn) > 80
    assert drawn[0].at == 0
    assert 10 < drawn[-1].at < 40  # 200 at 10 a second
    assert {request.at for request in OfflineWorkload(n_requests=5).requests(N_VOCAB)} == {0.0}


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"n_requests": 0}, "--requests"), ({"prompt_tokens": Lengths(0, 4)}, "--prompt-tokens"),
        ({"new_tokens": Lengths(5, 4)}, "--new-tokens"), ({"rate": -1.0}, "--rate"), ({"rate": float("nan")}, "--rate"),
        ({"seed": -1}, "--seed"),
    ],
)  # fmt: skip
def test_a_bad_workload_is_refused_with_its_flag(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        OfflineWorkload(**settings)


def test_times_count_from_when_a_request_was_due() -> None:
    engine = engine_with(Scheduler)
    spaced = [TimedRequest(0.02 * i, [1, 2, 3], 2) for i in range(5)]
    played = run_workload(engine, spaced)
    assert played.seconds > 0.08
    assert all(0 < first <= last < 0.08 for first, last in zip(played.first_token, played.latency, strict=True))
