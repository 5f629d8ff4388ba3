"""The metrics of an engine: counted and added up right, and the last minute forgotten in time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_type_hints

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cppbatch.engine.ideal import BareCosts, StepWork
from cppbatch.engine.observe.live_state import LiveCounters
from cppbatch.engine.observe.metrics import EngineParts, EngineStats, Metrics, RecentSteps, add_up
from cppbatch.engine.observe.windows import ROWS, SECONDS, Bins, Window, merge_histograms, percentile
from cppbatch.engine.request import FinishReason, GenerationEvent, RequestUsage
from cppbatch.server.observe.metrics import ServerMetrics
from cppbatch.server.observe.stats import RecentCompletions
from cppbatch.statistic import statistics_of
from tests.support.fakes import drain, fake_engine, greedy
from tests.support.virtual_time import Clock


def test_a_value_is_counted_in_the_first_bin_with_a_bound_it_does_not_exceed() -> None:
    bins = Bins((1, 2, 4))
    for value in (0, 1, 1.5, 2, 4, 4.5, 100):
        bins.add(value)
    counted = bins.histogram()
    assert (counted.bounds, counted.counts, counted.sum) == ([1, 2, 4], [2, 2, 1, 2], 113)
    assert merge_histograms([counted, counted]).counts == [4, 4, 2, 4]


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_percentile_is_the_smallest_value_that_is_enough(share: float) -> None:
    for n in range(1, 100):
        values = [float(value) for value in range(n)]
        found = percentile(values[::-1], share)
        assert found is not None
        assert sum(value <= found for value in values) >= share * n > sum(value < found for value in values)
    assert percentile([], share) is None


def test_a_window_drops_values_after_a_minute_and_reports_the_time_it_covers() -> None:
    clock = Clock(now=1000)
    window: Window[tuple[int]] = Window(clock, 100)
    for i in range(50):
        clock.now += 2
        window.add((i,))
    assert window.rows() == [(i,) for i in range(19, 50)]  # 0 to 60 seconds old
    assert window.seconds == 60
    clock.now += 59
    assert window.rows() == [(49,)]
    clock.now += 2
    assert window.rows() == []


def test_a_full_window_covers_a_shorter_time() -> None:
    clock = Clock(now=1000)
    window: Window[tuple[int]] = Window(clock, 10)
    for i in range(50):
        clock.now += 1
        window.add((i,))
    assert (len(window.rows()), window.seconds) == (10, 9)
    assert Window(clock, 10).seconds == 0


def test_an_engine_counts_each_step_once() -> None:
    engine = fake_engine(n_ctx=256, n_batch=16, n_parallel=4)
    for prompt in ("ab", "cdef", "g", "hij", "k"):
        engine.add_request(prompt, greedy(6, ignore_eos=True))
    drain(engine)
    stats = engine.stats()
    assert sum(stats.step_times.counts) == sum(stats.decode_times.counts) == stats.steps
    assert sum(stats.batch_sizes.counts) == sum(stats.sample_times.counts) == stats.decode_steps
    assert stats.batch_sizes.sum == stats.decode_rows
    assert 0 < stats.decode_times.sum < stats.step_times.sum
    recent = stats.recent_steps
    assert recent.steps == stats.steps
    assert recent.tokens_per_second == pytest.approx(stats.generated_tokens / recent.seconds)
    assert 1 <= (recent.batch_size_p50 or 0) <= (recent.batch_size_p95 or 0) <= 4
    assert 0 < (recent.step_ms_p50 or 0) <= (recent.step_ms_p95 or 0)


def test_stats_have_percentiles_of_the_time_that_requests_waited() -> None:
    """With one place, each of 20 requests waits for those before it."""
    engine = fake_engine(n_ctx=256, n_batch=16, n_parallel=1)
    assert engine.stats().recent_steps.wait_ms_p50 is None
    for _ in range(20):
        engine.add_request("ab", greedy(6, ignore_eos=True))
    waits = sorted(1000 * event.usage.queue_seconds for event in drain(engine) if event.usage)
    recent = engine.stats().recent_steps
    found = [recent.wait_ms_p50, recent.wait_ms_p95, recent.wait_ms_p99]
    assert found == pytest.approx([waits[9], waits[18], waits[19]], abs=0.5)


COSTS = BareCosts.of([(1, 1e-9), (16, 2e-9)], [(16, 1e-9)])


def stats_of(*batches: int) -> EngineStats:
    """Of an engine that has done such decode steps, of 10 tokens each."""
    metrics = Metrics(lambda: COSTS)
    for rows in batches:
        metrics.begin_step()
        metrics.lap("decode")
        metrics.count_step(decode_rows=rows, prompt_tokens=3)
        metrics.lap("sample")
        metrics.generated_tokens += 10
        metrics.end_step(StepWork(rows, (rows,), 0, 0, 3, 0, rows))
    scheduler: Any = SimpleNamespace(running=[1], waiting=[1, 2])
    return EngineParts(metrics, fake_engine().core.kv, scheduler, media=None).stats()


def test_stats_of_engines_add_up() -> None:
    one, other, idle = stats_of(1, 2, 300), stats_of(4), stats_of()
    total = add_up([one, other, idle])
    assert (total.steps, total.decode_rows, total.generated_tokens, total.running, total.waiting) == (4, 307, 40, 3, 6)
    assert total.mean_decode_batch == 307 / 4
    assert total.kv_cells == 3 * one.kv_cells
    assert total.batch_sizes.counts == [1, 1, 1, *[0] * (len(ROWS) - 3), 1]
    assert len(total.step_times.counts) == len(SECONDS) + 1
    assert total.step_seconds["decode"] == one.step_seconds["decode"] + other.step_seconds["decode"]
    assert total.recent_steps == RecentSteps(
        seconds=max(each.recent_steps.seconds for each in (one, other, idle)),
        steps=4,
        tokens_per_second=one.recent_steps.tokens_per_second + other.recent_steps.tokens_per_second,
    )
    assert total.recent_steps.step_ms_p95 is None
    assert add_up([one]) == one
    assert add_up([idle, idle]).mean_decode_batch == 0


def test_every_field_of_the_stats_is_declared_and_live_counters_are_some_of_them() -> None:
    assert [*statistics_of(EngineStats)] == [*EngineStats.__struct_fields__]
    stats, live = get_type_hints(EngineStats), get_type_hints(LiveCounters)
    assert live == {field: stats[field] for field in live}


def test_finish_reasons_that_only_one_engine_has_are_in_the_sum() -> None:
    one, other = (
        msgspec.structs.replace(stats_of(), finished=finished) for finished in ({"stop": 2}, {"stop": 1, "length": 4})
    )
    assert add_up([one, other]).finished == {"stop": 3, "length": 4}


def test_stats_survive_the_way_between_processes() -> None:
    stats = stats_of(1, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats


def usage(total: float, first: float = 0.5) -> RequestUsage:
    return RequestUsage(
        prompt_tokens=1, completion_tokens=1, queue_seconds=0.1, first_token_seconds=first, total_seconds=total
    )


def test_the_last_minute_has_the_completions_that_ended_in_it() -> None:
    clock = Clock(now=1000)
    recent = RecentCompletions(clock)
    assert recent.last_minute(None).requests == 0
    assert recent.last_minute(None).total_seconds.p50 is None
    recent.add(usage(100))
    clock.now += 30
    for seconds in range(1, 21):
        recent.add(usage(seconds, first=0))
    now = recent.last_minute(5.0)
    assert (now.requests, now.tokens_per_second, now.total_seconds.p50, now.total_seconds.p95) == (21, 5.0, 11, 20)
    assert (now.first_token_seconds.p50, now.queue_seconds.p95) == (0.5, 0.1)  # 0: had no token
    clock.now += 31
    later = recent.last_minute(5.0)
    assert (later.requests, later.total_seconds.p50, later.first_token_seconds.p50) == (20, 10, None)


def test_merged_events_count_a_gap_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(now=1000)
    monkeypatch.setattr("cppbatch.server.observe.metrics.perf_counter", clock)

    def events() -> Iterator[tuple[int, GenerationEvent]]:
        for index, seconds, n_tokens in ((0, 2.0, 1), (1, 1.0, 3), (0, 0.5, 5), (1, 0.0, 0), (0, 0.02, 1)):
            clock.now += seconds
            yield index, GenerationEvent(request_id="x", tokens=[7] * n_tokens)
        clock.now += 1
        reason = FinishReason.STOP
        yield 0, GenerationEvent(request_id="x", finish_reason=reason, usage=usage(4.0))
        yield 1, GenerationEvent(request_id="x", finish_reason=reason, usage=usage(4.0))

    metrics = ServerMetrics()
    with metrics.observe("here", 2) as observe:
        for index, event in events():
            observe(index, event)
    seen = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(metrics.page([]).decode())
        for sample in family.samples
    }
    assert seen["cppbatch_time_to_first_token_seconds_sum", None] == 2 + 3
    assert seen["cppbatch_inter_token_seconds_count", None] == 5 + 1
    assert seen["cppbatch_inter_token_seconds_sum", None] == pytest.approx(1.5 + 0.02)
    assert seen["cppbatch_inter_token_seconds_bucket", "0.25"] == 1
    assert seen["cppbatch_inter_token_seconds_bucket", "0.5"] == 6  # five tokens in 1.5 s
    assert seen["cppbatch_completion_time_seconds_sum", None] == pytest.approx(2 * 4.52)
    assert seen["cppbatch_generated_tokens_total", None] == 10
