"""Drafted and accepted tokens in the responses of every API, in /stats, in /metrics and in a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cppbatch import BatchInferenceEngine, EngineConfig, LocalEngine
from cppbatch.engine import core as core_module
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.engine.speculation import speculator
from cppbatch.jobs.job_request import JobRequest, Json
from cppbatch.jobs.journal import response_line
from cppbatch.server.api.batches.handler import BatchRequestHandler
from cppbatch.server.models.served import OneModel
from cppbatch.server.settings import ServerSettings
from tests.support.fakes import greedy, know
from tests.support.http_client import Http, answered
from tests.support.replay import Replay

SETTINGS: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 4, "n_threads": 1}
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get their drafts from `Replay` only, and look for them in every step."""

    def load(config: EngineConfig, progress: Callable[[float], bool] | None = None) -> Runtime:
        return msgspec.structs.replace(load_runtime(config, progress), proposers=[Replay()])

    monkeypatch.setattr(core_module, "load_runtime", load)
    monkeypatch.setattr(speculator, "_VAIN_STEPS", 1 << 40)


@pytest.fixture
def engine(engine: LocalEngine) -> LocalEngine:
    assert engine._engine
    know(engine._engine, {1: 0.010, 256: 0.011})  # drafts cost next to nothing
    return engine


async def post(http: Http, path: str, **fields: Any) -> Any:
    return await answered(http, path, {**GREEDY, **fields})


async def stream(http: Http, path: str, **fields: Any) -> list[Json]:
    """The events of a stream that are objects."""
    async with http.post(path, json={**GREEDY, **fields, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in (await answer.text()).splitlines()]
    return [json.loads(event) for event in events if event.startswith("{")]


async def last_event(http: Http, path: str, **fields: Any) -> Json:
    """The last event of a stream that is an object."""
    return (await stream(http, path, **fields))[-1]


CHAT: Json = {"messages": [{"role": "user", "content": "the cat"}]}
OPENAI: dict[str, Json] = {"/v1/completions": {"prompt": "the cat"}, "/v1/chat/completions": CHAT}


@pytest.mark.parametrize("path", OPENAI)
async def test_openai_s_usage_has_accepted_and_rejected_tokens(http: Http, path: str) -> None:
    def counts(answer: Json) -> tuple[int, int]:
        details = answer["usage"]["completion_tokens_details"]
        return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]

    body = OPENAI[path]
    first, again, plain = [await post(http, path, **body, **more) for more in ({}, {}, {"speculate": False})]
    assert counts(first) == counts(plain) == (0, 0)
    accepted, rejected = counts(again)
    assert 0 < accepted < again["usage"]["completion_tokens"]
    assert rejected > 0
    assert again["usage"]["total_tokens"] == first["usage"]["total_tokens"]
    for answer in (first, again, plain):
        del answer["choices"][0]["seed"]
    assert first["choices"] == again["choices"] == plain["choices"]
    assert counts(await last_event(http, path, **body, stream_options={"include_usage": True})) == (accepted, rejected)


async def test_several_completions_are_added_up(http: Http) -> None:
    for _ in range(2):
        answer = await post(http, "/v1/completions", prompt=["the cat", "a dog"], n=2)
    alone = await post(http, "/v1/completions", prompt="the cat")
    both = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert both > alone["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


async def test_llama_servers_timings_have_draft_counts_if_there_were_drafts(http: Http) -> None:
    path, body = "/completion", {"prompt": "the cat"}
    first, again, off = [await post(http, path, **body, **more) for more in ({}, {}, {"speculative.n_max": 0})]
    assert not {"draft_n", "draft_n_accepted"} & (first["timings"].keys() | off["timings"].keys())
    timings = again["timings"]
    assert 0 < timings["draft_n_accepted"] < timings["draft_n"]
    assert first["content"] == again["content"] == off["content"]
    last = await last_event(http, path, **body)
    assert (last["timings"]["draft_n"], last["timings"]["draft_n_accepted"]) == (
        timings["draft_n"],
        timings["draft_n_accepted"],
    )


async def test_generate_has_them_for_each_item_and_in_all(http: Http) -> None:
    first, again = [await post(http, "/generate", prompt="the cat") for _ in range(2)]
    assert (first["drafted_tokens"], first["accepted_tokens"]) == (0, 0)
    assert 0 < again["accepted_tokens"] < again["drafted_tokens"]
    batch = await post(http, "/generate/batch", prompts=["the cat", ""])
    one, wrong = batch["results"]
    without = await post(http, "/generate/batch", prompts=[{"prompt": "the cat", "speculate": False}])
    (off,) = without["results"]
    assert one["accepted_tokens"] > 0
    assert (off["drafted_tokens"], off["accepted_tokens"]) == (0, 0)
    assert "drafted_tokens" not in wrong
    assert one["text"] == off["text"] == again["text"]
    assert (batch["drafted_tokens"], batch["accepted_tokens"]) == (one["drafted_tokens"], one["accepted_tokens"])


async def test_results_of_a_batch_job_have_them(engine: LocalEngine) -> None:
    handler = BatchRequestHandler(OneModel.of(engine, ServerSettings()), defaults=GREEDY)
    request = JobRequest(
        line=1, custom_id="a", url="/v1/completions", body={"prompt": "the cat"}, is_plain=True, content_hash=0
    )
    for expected in (False, True):
        result = json.loads(response_line(request, await handler(request)).data)
        assert (result["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0) is expected


async def test_totals_are_in_the_stats_and_in_the_metrics(http: Http) -> None:
    for _ in range(2):
        answer = await post(http, "/generate", prompt="the cat")
    drafted, accepted = answer["drafted_tokens"], answer["accepted_tokens"]
    async with http.get("/stats") as page:
        stats = await page.json()
    assert (stats["drafted_tokens"], stats["accepted_tokens"]) == (drafted, accepted)
    assert 0 < stats["draft_steps"] < stats["decode_steps"]
    async with http.get("/metrics") as page:
        families = text_string_to_metric_families(await page.text())
    totals = {sample.name: sample.value for family in families for sample in family.samples}
    assert totals["cppbatch_worker_drafted_tokens_total"] == drafted
    assert totals["cppbatch_worker_accepted_tokens_total"] == accepted
    assert totals["cppbatch_worker_draft_steps_total"] == stats["draft_steps"]


def test_python_s_usage_has_them_and_a_trace_shows_them_step_by_step(tiny_llama: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with BatchInferenceEngine(tiny_llama, trace=str(trace), **SETTINGS) as engine:
        know(engine, {1: 0.010, 256: 0.011})
        first, again = [engine.generate(["the cat"], greedy(24, ignore_eos=True))[0] for _ in range(2)]
    assert (first.usage.drafted_tokens, first.usage.accepted_tokens) == (0, 0)
    assert first.tokens == again.tokens
    events = json.loads(trace.read_text())
    for name, count in (("drafted", again.usage.drafted_tokens), ("accepted", again.usage.accepted_tokens)):
        values = [event["args"][name] for event in events if event.get("name") == name and event["ph"] == "C"]
        assert sum(values) == count > 0


async def test_llama_server_s_stream_has_a_chunk_for_each_token_with_probabilities(http: Http) -> None:
    """Drafts bring several tokens in one event."""
    body = {"prompt": "the cat", "n_probs": 2}
    whole = await post(http, "/completion", **body)
    *parts, last = await stream(http, "/completion", **body)
    assert last["timings"]["draft_n_accepted"] > 0
    assert [len(part["completion_probabilities"]) for part in parts] == [1] * 24
    assert [part["tokens"] for part in parts] == [[part["completion_probabilities"][0]["id"]] for part in parts]
    assert "".join(part["content"] for part in parts) == whole["content"]
