"""The figures of engine and server: counted right, added up right, forgotten after a minute, shown to Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from cppbatch import LocalEngine
from cppbatch.cluster.engine_client import Health, WorkerState
from cppbatch.engine.histogram import ROWS, SECONDS, Bins, merged
from cppbatch.engine.metrics import EngineStats, Metrics, RecentSteps, add_up
from cppbatch.engine.request import FinishReason, GenerationEvent, RequestUsage
from cppbatch.engine.rolling_window import Window, percentile
from cppbatch.errors import EngineClosed
from cppbatch.server.app import create_app
from cppbatch.server.metrics import ServerMetrics
from cppbatch.server.recent import Recent
from tests.fakes import drain, fake_engine, greedy

Http = TestClient[Any, Any]
Samples = dict[tuple[str, ...], float]

BODY = {"prompt": "Hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def engine(tiny_llama: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(tiny_llama, n_ctx=1024, n_parallel=4, n_threads=1) as engine:
        yield engine


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncIterator[Http]:
    async with TestClient(TestServer(create_app(engine), handler_cancellation=True)) as client:
        yield client


# --- counting ---------------------------------------------------------------------------------------------------------


def test_a_value_is_counted_in_the_bin_whose_bound_it_does_not_exceed() -> None:
    bins = Bins((1, 2, 4))
    for value in (0, 1, 1.5, 2, 4, 4.5, 100):
        bins.add(value)
    counted = bins.histogram()
    assert (counted.bounds, counted.counts, counted.sum) == ([1, 2, 4], [2, 2, 1, 2], 113)
    assert merged([counted, counted]).counts == [4, 4, 2, 4]


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_percentile_is_the_smallest_value_that_is_enough(share: float) -> None:
    for n in range(1, 100):
        values = [float(value) for value in range(n)]
        found = percentile(values[::-1], share)
        assert found is not None
        assert sum(value <= found for value in values) >= share * n > sum(value < found for value in values)
    assert percentile([], share) is None


def test_a_window_forgets_after_a_minute_and_says_how_long_a_time_it_knows() -> None:
    clock = Clock()
    window = Window(100, clock)
    for i in range(50):
        clock.now += 2
        window.add((i,))
    assert window.rows() == [(i,) for i in range(19, 50)]  # 0 to 60 seconds old
    assert window.seconds == 60
    clock.now += 59
    assert window.rows() == [(49,)]
    clock.now += 2
    assert window.rows() == []


def test_a_full_window_knows_of_a_shorter_time() -> None:
    clock = Clock()
    window = Window(10, clock)
    for i in range(50):
        clock.now += 1
        window.add((i,))
    assert (len(window.rows()), window.seconds) == (10, 9)
    assert Window(10, clock).seconds == 0


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


def stats_of(*batches: int) -> EngineStats:
    """Of an engine that has done such decode steps, of 10 tokens each."""
    metrics = Metrics()
    for rows in batches:
        metrics.begin_step()
        metrics.lap("decode")
        metrics.count_step(decode_rows=rows, prompt_tokens=3)
        metrics.lap("sample")
        metrics.generated_tokens += 10
        metrics.end_step()
    with_pool = fake_engine()
    return metrics.stats(with_pool.kv, running=1, waiting=2)


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
    clock = Clock()
    recent = Recent(clock)
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


# --- over HTTP --------------------------------------------------------------------------------------------------------


async def scrape(http: Http) -> Samples:
    """Every sample of the page, by name and values of the labels, a bin's bound last."""
    async with http.get("/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        page = await answer.text()
    samples: Samples = {}
    names: list[str] = []
    for family in text_string_to_metric_families(page):
        names.append(family.name)
        for sample in family.samples:
            bound = [sample.labels.pop("le")] if "le" in sample.labels else []
            key = (sample.name.removeprefix("cppbatch_"), *sample.labels.values(), *bound)
            assert key not in samples
            samples[key] = sample.value
    assert len(names) == len(set(names))
    return samples


async def ask(http: Http, path: str = COMPLETIONS, **fields: object) -> Any:
    async with http.post(path, json={**BODY, **fields}) as answer:
        return await answer.json() if answer.content_type == "application/json" else await answer.text()


async def test_prometheus_gets_what_was_done(http: Http) -> None:
    for _ in range(3):
        await ask(http)
    await ask(http, n=2, stream=True)
    await ask(http, CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    await ask(http, temperature=-1)
    await ask(http, "/v1/nothing")
    seen = await scrape(http)
    assert seen["http_requests_total", COMPLETIONS, "200"] == 4
    assert seen["http_requests_total", COMPLETIONS, "400"] == 1
    assert seen["http_requests_total", CHAT, "200"] == 1
    assert seen["http_requests_total", "other", "404"] == 1
    assert seen["completions_total", COMPLETIONS, "length"] == 5
    assert seen["generated_tokens_total", COMPLETIONS] == 5 * 8
    assert seen["generated_tokens_total", CHAT] == 4
    for name in ("time_to_first_token", "queue_time", "completion_time"):
        assert seen[f"{name}_seconds_count", COMPLETIONS] == seen[f"{name}_seconds_bucket", COMPLETIONS, "+Inf"] == 5
    assert 5 <= seen["inter_token_seconds_count", COMPLETIONS] <= 5 * 7  # fewer where first events were merged
    assert seen["time_to_first_token_seconds_sum", COMPLETIONS] < seen["completion_time_seconds_sum", COMPLETIONS]
    assert seen["requests_in_flight", COMPLETIONS] == 0
    assert seen["prompt_tokens_total", COMPLETIONS] > seen["cached_prompt_tokens_total", COMPLETIONS]


async def test_merged_events_count_a_gap_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("cppbatch.server.metrics.perf_counter", clock)

    async def events() -> AsyncGenerator[tuple[int, GenerationEvent], None]:
        for index, seconds, n_tokens in ((0, 2.0, 1), (1, 1.0, 3), (0, 0.5, 5), (1, 0.0, 0), (0, 0.02, 1)):
            clock.now += seconds
            yield index, GenerationEvent(request_id="x", tokens=[7] * n_tokens)
        clock.now += 1
        reason = FinishReason.STOP
        yield 0, GenerationEvent(request_id="x", finish_reason=reason, usage=usage(4.0))
        yield 1, GenerationEvent(request_id="x", finish_reason=reason, usage=usage(4.0))

    metrics = ServerMetrics()
    assert len([event async for event in metrics.observe(events(), "here", 2)]) == 7
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


async def test_prometheus_gets_what_each_worker_tells(http: Http, engine: LocalEngine) -> None:
    await asyncio.gather(*(ask(http, seed=i) for i in range(4)))
    seen, stats = await scrape(http), await engine.stats()
    assert (seen["worker_up", "local"], seen["worker_restarts_total", "local"]) == (1, 0)
    assert seen["worker_steps_total", "local"] == seen["worker_step_seconds_count", "local"] == stats.steps
    assert seen["worker_batch_size_sum", "local"] == stats.decode_rows
    assert seen["worker_batch_size_bucket", "local", "4.0"] == seen["worker_batch_size_count", "local"]
    assert seen["worker_generated_tokens_total", "local"] == 32
    assert (
        sum(seen["worker_kv_cells", state, "local"] for state in ("used", "cached", "free")) == stats.kv_cells == 1024
    )
    assert seen["worker_prefix_queries_total", "local"] == stats.prefix_queries == 4
    assert seen["worker_running", "local"] == seen["worker_waiting", "local"] == seen["worker_in_flight", "local"] == 0


async def test_a_client_that_goes_away_is_counted_as_such(http: Http) -> None:
    async with http.post(COMPLETIONS, json={**BODY, "max_tokens": 900, "stream": True}) as answer:
        await answer.content.readline()
        assert (await scrape(http))["requests_in_flight", COMPLETIONS] == 1
        answer.close()
    with pytest.raises(asyncio.TimeoutError):
        await http.post(COMPLETIONS, json={**BODY, "max_tokens": 900}, timeout=aiohttp.ClientTimeout(total=0.05))
    for _ in range(100):
        seen = await scrape(http)
        if seen.get(("completions_total", COMPLETIONS, "cancelled")) == 2:
            break
        await asyncio.sleep(0.02)
    assert seen["completions_total", COMPLETIONS, "cancelled"] == 2
    assert seen["http_requests_total", COMPLETIONS, "disconnected"] == 2
    assert seen["requests_in_flight", COMPLETIONS] == 0
    assert 0 < seen["generated_tokens_total", COMPLETIONS] < 1800


async def test_a_text_that_its_own_request_ends_is_a_400(http: Http) -> None:
    answer = await ask(http, suppress_tokens=list(range(await ask_vocabulary(http))))
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", "suppress_tokens")
    assert "no token can be sampled" in answer["error"]["message"]
    seen = await scrape(http)
    assert seen["http_requests_total", COMPLETIONS, "400"] == seen["completions_total", COMPLETIONS, "error"] == 1


async def ask_vocabulary(http: Http) -> int:
    async with http.get("/v1/models") as answer:
        n_vocab: int = (await answer.json())["data"][0]["meta"]["n_vocab"]
        return n_vocab


async def test_stats_have_the_last_minute_and_the_workers(http: Http, engine: LocalEngine) -> None:
    for _ in range(4):
        await ask(http)
    async with http.get("/stats") as answer:
        stats = await answer.json()
    assert set(EngineStats.__struct_fields__) < set(stats)
    assert (stats["steps"], stats["kv_cells"]) == ((await engine.stats()).steps, 1024)
    minute = stats["last_minute"]
    assert minute["requests"] == 4
    assert minute["tokens_per_second"] == pytest.approx(32 / stats["recent_steps"]["seconds"], rel=0.01)
    for name in ("queue_seconds", "first_token_seconds", "total_seconds"):
        assert 0 < minute[name]["p50"] <= minute[name]["p95"] < 10
    assert minute["queue_seconds"]["p50"] < minute["first_token_seconds"]["p50"] < minute["total_seconds"]["p50"]
    (worker,) = stats["workers"]
    assert (worker["name"], worker["health"]["status"], worker["in_flight"]) == ("local", "ok", 0)
    assert worker["stats"]["steps"] == stats["steps"]


async def test_models_name_the_workers_that_run_them(http: Http) -> None:
    async with http.get("/v1/models") as answer:
        (model,) = (await answer.json())["data"]
    assert model["meta"]["workers"] == [{"name": "local", "device": None, "status": "ok"}]
    assert (model["object"], model["owned_by"]) == ("model", "cppbatch")


async def test_figures_can_be_had_while_a_worker_restarts(
    http: Http, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_stats() -> EngineStats:
        raise EngineClosed("no worker answers")

    async def workers() -> list[WorkerState]:
        return [WorkerState(name="0", health=Health(status="restarting", error="killed"), in_flight=3, restarts=2)]

    await ask(http)
    monkeypatch.setattr(engine, "stats", no_stats)
    monkeypatch.setattr(engine, "workers", workers)
    async with http.get("/stats") as answer:
        stats = await answer.json()
    assert set(stats) == {"last_minute", "workers", "batches"}
    assert (stats["last_minute"]["requests"], stats["last_minute"]["tokens_per_second"]) == (1, None)
    assert (stats["workers"][0]["restarts"], stats["workers"][0]["stats"]) == (2, None)
    seen = await scrape(http)
    assert (seen["worker_up", "0"], seen["worker_restarts_total", "0"], seen["worker_in_flight", "0"]) == (0, 2, 3)
    assert ("worker_steps_total", "0") not in seen


async def test_prometheus_is_answered_while_the_model_loads() -> None:
    class Loading:
        def health(self) -> Health:
            return Health(status="loading", progress=0.4)

        async def workers(self) -> list[WorkerState]:
            return [WorkerState(name="0", health=self.health(), in_flight=0)]

    async with TestClient(TestServer(create_app(Loading()))) as http:  # type: ignore[arg-type]
        assert (await scrape(http))["worker_up", "0"] == 0
        await ask(http)
        assert (await scrape(http))["http_requests_total", COMPLETIONS, "503"] == 1
