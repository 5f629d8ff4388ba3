"""The simulated fleet: nothing is lost, nothing depends on chance, and more of a good thing is never worse."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from fleet.conversations import Load, LogNormal, SimulatedRequest, conversations, rate_at
from fleet.replica import SimulatedReplica
from fleet.result import FleetResult, FleetRun, fleet_result
from fleet.routing import ROUTINGS
from fleet.serve_autoscaling import Autoscaling, ServeAutoscaler
from fleet.simulation import FleetSimulation
from fleet.step_times import StepTimes, at

pytestmark = pytest.mark.nightly

TIMES = StepTimes(
    name="a CPU", source="made up", rows_ms=[(1, 8.0), (4, 14.0), (8, 18.0)], prompt_ms=[(4, 10.0), (512, 340.0)],
    row_cell_us=0.5, prompt_cell_us=0.3, step_ms=0.5, save_us=6.0, copy_us=4.0, cell_bytes=1000, start_s=5.0,
    on_gpu=False, n_parallel=8, stream_cells=2048,
)  # fmt: skip
SHORT: dict[str, Any] = {
    "n_apps": 6, "max_tokens": 1500, "system_tokens": LogNormal(300, 0.3), "user_tokens": LogNormal(40, 0.5),
    "output_tokens": LogNormal(20, 0.5), "think_s": LogNormal(2, 0.5),
}  # fmt: skip


def simulate(n: int = 3, *, routing: str = "prefix", autoscaling: Autoscaling | None = None, **load: Any) -> FleetRun:
    settings = {"rate": 4.0, "seconds": 30.0} | SHORT | load
    return FleetSimulation(
        TIMES, Load(**settings), routing=routing, n_replicas=n, autoscaling=autoscaling, cache_bytes=1 << 20
    ).run()


def result(run: FleetRun, **load: Any) -> FleetResult:
    return fleet_result(run, Load(**{"rate": 4.0, "seconds": 30.0} | load), routing="", warm_up_s=10.0)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_request_ends_once_with_all_its_tokens_and_every_cell_is_free(routing: str) -> None:
    run = simulate(routing=routing)
    assert len(run.finished) > 50
    assert len({request.id for request in run.finished}) == len(run.finished)
    for request in run.finished:
        assert request.arrived_at <= request.admitted_at < request.first_token_at <= request.finished_at
        assert request.n_generated == request.n_output
        assert request.n_cached < request.n_prompt
    for replica in run.replicas:
        replica.kv.check()
        assert replica.kv.n_used == replica.n_requests == 0


def test_a_seed_gives_the_same_run_whatever_was_run_before() -> None:
    def times(run: FleetRun) -> list[tuple[str, int, float, float]]:
        return [(r.id, r.replica, r.first_token_at, r.finished_at) for r in run.finished]

    first = times(simulate(seed=3))
    simulate(seed=4)
    assert times(simulate(seed=3)) == first
    assert times(simulate(seed=4)) != first


def test_in_saturation_more_replicas_never_lower_throughput() -> None:
    speeds = [result(simulate(n, rate=16.0)).output_tokens_s for n in (1, 2, 4, 8)]
    assert speeds == sorted(speeds)
    assert speeds[1] > 1.5 * speeds[0]


def test_prefix_routing_computes_fewer_prompt_tokens_than_any_other() -> None:
    results = {routing: result(simulate(4, routing=routing, n_apps=20)) for routing in ROUTINGS}
    best = results.pop("prefix")
    assert best.hit_rate > 1.1 * max(other.hit_rate for other in results.values())
    assert best.hit_rate <= best.possible_hit_rate < 1
    assert all(best.ttft_p50 < other.ttft_p50 for other in results.values())


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    replica = SimulatedReplica(TIMES, cache_bytes=1 << 20)
    request = SimulatedRequest(0, 0, np.arange(100, dtype=np.int32), np.arange(3, dtype=np.int32))
    request.arrived_at = 0.0
    replica.add(request, 0.0)
    now = 0.0
    while (seconds := replica.begin(now)) is not None:
        now += seconds
        replica.end(now)
    prefill = 0.5 + at(TIMES.prompt_ms, 100)
    decode = 2 * (0.5 + 8.0) + (100 + 101) * 0.5e-3
    assert request.first_token_at == pytest.approx(prefill / 1e3)
    assert request.finished_at == pytest.approx((prefill + decode) / 1e3)
    assert replica.n_steps == 3


def test_a_second_turn_takes_the_whole_first_one_from_the_cache() -> None:
    replica = SimulatedReplica(TIMES, cache_bytes=1 << 20)
    prompt, output = np.arange(100, dtype=np.int32), np.arange(100, 110, dtype=np.int32)
    first = SimulatedRequest(0, 0, prompt, output)
    second = SimulatedRequest(0, 1, np.concatenate([prompt, output, np.arange(5, dtype=np.int32)]), output)
    now = 0.0
    for request in (first, second):
        replica.add(request, now)
        while (seconds := replica.begin(now)) is not None:
            now += seconds
            replica.end(now)
    assert (first.n_cached, second.n_cached) == (0, 109)


def test_times_between_two_measured_points_are_on_the_line_through_them() -> None:
    curve = [(1, 10.0), (3, 20.0), (4, 40.0)]
    assert [at(curve, n) for n in (1, 2, 3, 4, 5)] == [10.0, 15.0, 20.0, 40.0, 60.0]


@pytest.mark.parametrize(("n", "n_before"), [(1, 0), (100, 7), (512, 0), (513, 0), (1700, 30)])
def test_the_cells_before_each_token_of_a_prompt_are_those_before_its_ubatch(n: int, n_before: int) -> None:
    assert TIMES.cells_before_ubatches(n, n_before) == sum(n_before + i // 512 * 512 for i in range(n))


def test_conversations_come_at_the_rate_of_the_day_and_in_bursts() -> None:
    load = Load(rate=100.0, seconds=1000.0, day_s=1000.0, day_swing=0.6)
    starts = np.array([at for at, _ in conversations(load)])
    assert len(starts) == pytest.approx(33_333, rel=0.03)
    noon, midnight = ((starts > 450) & (starts < 550)).sum(), (starts < 100).sum()
    assert noon / midnight == pytest.approx(1.6 / 0.42, rel=0.1)
    assert rate_at(load, np.array([0.0, 500.0])).tolist() == pytest.approx([40.0, 160.0])
    counts = np.bincount(np.array([at for at, _ in conversations(Load(rate=100.0, seconds=1000.0))]).astype(int))
    assert counts.var() / counts.mean() == pytest.approx(4.0, rel=0.3)  # burstiness 2


def test_a_conversation_is_the_same_in_any_order_of_answers() -> None:
    load = Load(rate=1.0, seconds=100.0)

    def texts() -> list[list[int]]:
        found = []
        for _, conversation in conversations(load):
            while (request := conversation.next_request()) is not None:
                found.append([*request.prompt.tolist(), *request.output])
        return found

    assert texts() == texts()


def settle(settings: Autoscaling, loads: list[tuple[int, int]]) -> list[int]:
    """The targets after each stretch of (seconds, ongoing requests)."""
    autoscaler, now, targets = ServeAutoscaler(settings), 0.0, []
    for seconds, n in loads:
        for _ in range(seconds):
            autoscaler.observe(now, n)
            now += 1
        targets.append(autoscaler.target)
    return targets


def test_replicas_follow_ongoing_requests_after_the_delays_within_the_bounds() -> None:
    settings = Autoscaling(
        min_replicas=1, max_replicas=8, target_ongoing_requests=4, upscale_delay_s=10, downscale_delay_s=60,
        look_back_period_s=1,
    )  # fmt: skip
    assert settle(settings, [(9, 20), (5, 20), (20, 100), (30, 4), (40, 4)]) == [1, 5, 8, 8, 1]


def test_a_short_peak_starts_no_replica() -> None:
    settings = Autoscaling(max_replicas=8, target_ongoing_requests=4, upscale_delay_s=10, look_back_period_s=1)
    assert settle(settings, [(30, 4), (8, 40), (30, 4)]) == [1, 1, 1]


def test_an_autoscaled_fleet_grows_with_the_load_drains_and_loses_nothing() -> None:
    scaling = Autoscaling(
        min_replicas=1, max_replicas=6, target_ongoing_requests=3, upscale_delay_s=3, downscale_delay_s=15,
        look_back_period_s=5,
    )  # fmt: skip
    run = simulate(autoscaling=scaling, rate=5.0, seconds=200.0, day_s=200.0, day_swing=1.0)
    ready = [n for _, _, n, _ in run.sizes]
    assert ready[0] == ready[-1] == 1
    assert max(ready) >= 3
    assert len(run.replicas) >= max(ready)
    assert run.replica_s < 0.8 * max(ready) * run.end_s
    assert all(request.n_generated == request.n_output for request in run.finished)


def test_a_replica_takes_requests_only_when_it_has_started() -> None:
    scaling = Autoscaling(
        min_replicas=1, max_replicas=4, target_ongoing_requests=2, upscale_delay_s=0, look_back_period_s=1
    )
    run = simulate(autoscaling=scaling, rate=8.0)
    second = next(now for now, _, ready, _ in run.sizes if ready > 1)
    decided = next(now for now, target, _, _ in run.sizes if target > 1)
    assert second - decided == pytest.approx(TIMES.start_s, abs=1.0)


def test_step_times_with_an_unknown_field_are_refused() -> None:
    data = msgspec.json.encode(TIMES).replace(b"step_ms", b"step_us")
    with pytest.raises(msgspec.ValidationError, match="step_us"):
        msgspec.json.decode(data, type=StepTimes)
