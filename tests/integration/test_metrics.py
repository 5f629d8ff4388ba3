"""The figures of engine and server: counted right, added up right, forgotten after a minute, shown to Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from cppbatch import LocalEngine
from cppbatch.cluster.engines.client import Health, ScalingState, WorkerState
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.errors import EngineClosed
from cppbatch.server.app import create_app
from tests.support.http_client import Http, http_to

Samples = dict[tuple[str, ...], float]

BODY: dict[str, Any] = {"prompt": "Hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True}

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncIterator[Http]:
    async with TestClient(TestServer(create_app(engine), handler_cancellation=True)) as client:
        yield client


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


async def ask(http: Http, path: str = COMPLETIONS, **fields: Any) -> Any:
    async with http.post(path, json={**BODY, **fields}) as answer:
        return await answer.json() if answer.content_type == "application/json" else await answer.text()


async def test_prometheus_gets_the_counts_of_requests_and_tokens(http: Http) -> None:
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


async def test_prometheus_gets_the_figures_of_each_worker(http: Http, engine: LocalEngine) -> None:
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


async def test_a_client_that_disconnects_is_counted_as_such(http: Http) -> None:
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
    assert set(stats) == {"last_minute", "workers", "scaling", "batches", "gpus"}
    assert (stats["last_minute"]["requests"], stats["last_minute"]["tokens_per_second"]) == (1, None)
    assert (stats["workers"][0]["restarts"], stats["workers"][0]["stats"]) == (2, None)
    seen = await scrape(http)
    assert (seen["worker_up", "0"], seen["worker_restarts_total", "0"], seen["worker_in_flight", "0"]) == (0, 2, 3)
    assert ("worker_steps_total", "0") not in seen


async def test_workers_that_start_and_end_are_counted(
    http: Http, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with http.get("/health") as answer:
        assert "scaling" not in await answer.json()
    assert not [key for key in await scrape(http) if key[0] in ("workers", "scale_events_total")]
    state = ScalingState(
        min_workers=1, max_workers=4, running=2, starting=1, draining=0, scale_ups=5, scale_downs=3, held_back="why"
    )
    monkeypatch.setattr(engine, "scaling", lambda: state)
    async with http.get("/health") as answer:
        health = await answer.json()
    async with http.get("/stats") as answer:
        stats = await answer.json()
    assert health["scaling"] == stats["scaling"] == msgspec.structs.asdict(state)
    seen = await scrape(http)
    assert [seen["workers", name] for name in ("running", "starting", "draining")] == [2, 1, 0]
    assert [seen["scale_events_total", name] for name in ("up", "down")] == [5, 3]


async def test_prometheus_is_answered_while_the_model_loads() -> None:
    class Loading:
        def health(self) -> Health:
            return Health(status="loading", progress=0.4)

        def scaling(self) -> None:
            return None

        async def workers(self) -> list[WorkerState]:
            return [WorkerState(name="0", health=self.health(), in_flight=0)]

    async with http_to(Loading()) as http:
        assert (await scrape(http))["worker_up", "0"] == 0
        await ask(http)
        assert (await scrape(http))["http_requests_total", COMPLETIONS, "503"] == 1
