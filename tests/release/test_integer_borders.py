"""Integers around every border, in every field of every endpoint and of every line of a batch file: 200 or 400."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.jobs.input.format import InputFormat
from cppbatch.jobs.input.lines import parse_json_line
from cppbatch.jobs.input.request_builder import RequestBuilder
from cppbatch.jobs.job_request import JobRequest
from cppbatch.server.api.batches.handler import URLS, BatchRequestHandler
from cppbatch.server.app import create_app
from cppbatch.server.http.limits import Limits
from cppbatch.server.models.served import OneModel
from cppbatch.server.openapi import document
from cppbatch.server.settings import ServerSettings
from tests.support.sane_figures import assert_sane

Json = dict[str, Any]
Place = tuple[str | int, ...]
"""Where in a body: keys, and 0 for the first entry of a list."""

DOCUMENT: Json = msgspec.json.decode(document())
USER = {"role": "user", "content": "abc"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
CALL: dict[str, Any] = {"type": "function", "id": "a", "function": {"name": "f", "arguments": {}}}
VALID: dict[str, Json] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/chat/completions/input_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "abc", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "abc"},
    "/v1/messages": {"model": "tiny-llama", "messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "tiny-llama", "messages": [USER]},
    "/v1/embeddings": {"input": "abc"},
    "/embeddings": {"content": "abc"},
    "/v1/rerank": {"query": "abc", "documents": ["a", "b"]},
    "/generate": {"prompt": "abc", "max_tokens": 2},
    "/generate/batch": {"prompts": ["abc", {"prompt": "de"}], "max_tokens": 2},
    "/generate/batch/cancel": {"request_id": "a", "index": 0},
    "/completion": {"prompt": "abc", "n_predict": 2},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
    "/tokenize": {"content": "abc"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [USER]},
    "/api/chat": {"model": "tiny-llama", "messages": [USER], "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"model": "tiny-llama", "prompt": "abc", "options": {"num_predict": 2}, "stream": False},
    "/api/embed": {"model": "tiny-llama", "input": "abc"},
    "/api/embeddings": {"model": "tiny-llama", "prompt": "abc"},
    "/v1/batches": {"input_file_id": "a", "endpoint": "/v1/completions", "completion_window": "24h"},
}
STATUSES = {"/v1/batches": (400, 503), "/generate/batch/cancel": (400, 404)}
VECTORS = ("/v1/embeddings", "/embeddings", "/v1/rerank")
SAME = {
    *("/completions", "/chat/completions", "/chat/completions/input_tokens", "/responses", "/responses/input_tokens"),
    *("/embedding", "/rerank", "/reranking", "/v1/reranking"),
}
"""Other paths of the same endpoints."""
OTHERS: dict[str, list[Place]] = {
    "/v1/completions": [
        ("prompt", 0),
        ("prompt", 0, 0),
        ("logit_bias", "5"),
        ("json_schema", "minimum"),
        ("lora", "a"),
    ],
    "/v1/chat/completions": [
        ("messages", 0, "tool_calls", 0, "function", "arguments", "x"),
        ("tools", 0, "function", "parameters", "properties", "x", "multipleOf"),
        ("chat_template_kwargs", "x"),
        ("response_format", "schema", "maxLength"),
    ],
    "/v1/responses": [("text", "format", "schema", "minItems")],
    "/v1/messages": [("tools", 0, "input_schema", "maxProperties"), ("metadata", "x")],
    "/v1/embeddings": [("input", 0), ("input", 0, 0)],
    "/generate": [("prompt", 0)],
    "/generate/batch": [("prompts", 0, "prompt", 0), ("prompts", 0, "top_k"), ("prompts", 0)],
    "/completion": [("prompt", 0), ("prompt", 0, 0), ("logit_bias", 0, 0), ("logit_bias", 0, 1), ("logit_bias", "5")],
    "/tokenize": [("content", 0)],
    "/api/chat": [
        ("options", "num_ctx"),
        ("options", "temperature"),
        ("options", "num_predict"),
        ("format", "minimum"),
    ],
    "/api/generate": [("options", "top_k"), ("options", "seed"), ("keep_alive",), ("context", 0)],
    "/api/embed": [("input", 0), ("dimensions",)],
}
"""Places that the document has as anything at all, or as a value of several kinds."""
BORDERS = (0, 1, 2, 16, 100, 128, 4096, 2**15, 2**16, 2**24, 2**31, 2**32, 2**53, 2**63, 2**64, 2**65, 10**30, 10**400)


def integers(chance: random.Random, n: int) -> Iterator[int]:
    """Near the borders, and the most digits that Python reads."""
    for _ in range(n):
        yield chance.choice((1, -1)) * chance.choice(BORDERS) + chance.randint(-2, 2)
    yield 10**4299


def places(path: str) -> list[Place]:
    """Where the body of an endpoint may have numbers."""
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return [*_numbers(body, (), 0), *OTHERS.get(path, [])]


def _numbers(schema: Json, place: Place, depth: int) -> Iterator[Place]:
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if schema.get("type") in ("integer", "number"):
        yield place
    for offered in schema.get("anyOf", []):
        yield from _numbers(offered, place, depth)
    if depth < 4 and "items" in schema:
        yield from _numbers(schema["items"], (*place, 0), depth + 1)
    if depth < 4:
        for name, inner in schema.get("properties", {}).items():
            yield from _numbers(inner, (*place, name), depth + 1)


def body_with(path: str, place: Place, value: int) -> Json:
    """A good body but for this value there."""
    body: Json = copy.deepcopy(VALID[path])
    at: Any = body
    for key, following in itertools.pairwise(place):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(key, int):
            if not at or not isinstance(at[0], (dict, list)) or isinstance(at[0], list) != isinstance(following, int):
                at[:] = [empty]
            at = at[0]
        else:
            if not isinstance(at.get(key), (dict, list)) or isinstance(at[key], list) != isinstance(following, int):
                at[key] = empty
            at = at[key]
    if isinstance(place[-1], int):
        at[:] = [value]
    else:
        at[place[-1]] = value
    if "tools" in body and path == "/v1/chat/completions":
        body["tools"][0] = {**TOOL, "function": {**TOOL["function"], **body["tools"][0].get("function", {})}}
    if place[:3] == ("messages", 0, "tool_calls") and path == "/v1/chat/completions":
        call = body["messages"][0]["tool_calls"][0]
        body["messages"][0] = {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "f", **call["function"]}}],
        }
    if path == "/v1/messages" and "tools" in body:
        body["tools"][0].setdefault("name", "f")
    return body


@contextlib.asynccontextmanager
async def serving(model: Path, **settings: Any) -> AsyncIterator[tuple[EngineProcess, TestClient[Any, Any]]]:
    limits = Limits(max_n=4, max_tokens=8)
    config: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 8, "n_threads": 1, "max_queue": 100_000, **settings}
    async with EngineProcess(model, **config) as engine:
        app = create_app(engine, ServerSettings(limits=limits))
        async with TestClient(TestServer(app)) as client:
            yield engine, client


async def ask(client: TestClient[Any, Any], path: str, body: Json) -> None:
    async with client.post(path, data=json.dumps(body)) as answer:
        text = await answer.text()
        assert answer.status in STATUSES.get(path, (200, 400)), f"{path} {body}: {text}"[:2000]
        assert len(text) < 20_000


async def all_asked(client: TestClient[Any, Any], path: str, n: int) -> None:
    """Each number in each field; 16 requests at once."""
    chance, at_once = random.Random(path), asyncio.Semaphore(16)

    async def one(body: Json) -> None:
        async with at_once:
            await asyncio.wait_for(ask(client, path, body), 60)

    bodies = [body_with(path, place, value) for place in places(path) for value in integers(chance, n)]
    assert bodies
    await asyncio.gather(*(one(body) for body in bodies))


async def assert_nothing_stays(engine: EngineProcess, client: TestClient[Any, Any]) -> None:
    await ask(client, "/api/generate", {**VALID["/api/generate"], "keep_alive": -1})  # one of a second may have ended
    await asyncio.to_thread(assert_sane, str(client.make_url("/")).rstrip("/"))
    stats = await engine.stats()
    assert (engine.in_flight, stats.running, stats.waiting, stats.kv_cells_used) == (0, 0, 0, 0)
    (worker,) = await engine.workers()
    assert worker.restarts == 0
    assert worker.health.status == "ok"


N = pytest.mark.parametrize("n", [2, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(5400)])])


@N
async def test_integers_in_every_field_of_every_endpoint(tiny_llama: Path, n: int) -> None:
    assert {path for path, methods in DOCUMENT["paths"].items() if "requestBody" in methods.get("post", {})} == {
        *VALID, *SAME, "/v1/files", "/lora-adapters", "/props", "/slots/{id}", "/models/load", "/models/unload",
        "/api/show", "/api/pull", "/api/create", "/api/copy", "/api/push", "/file-texts",
    }  # fmt: skip
    async with serving(tiny_llama) as (engine, client):
        for path in VALID:
            if path not in VECTORS:
                await all_asked(client, path, n)
        for value in integers(random.Random(1), n):
            for query in (f"/v1/files?limit={value}", f"/v1/batches?limit={value}", f"/slots?fail_on_no_slot={value}"):
                async with client.get(query) as answer:
                    assert answer.status in (200, 400, 503), query
            async with client.post(f"/slots/{value}?action=save", json={"filename": "a.bin"}) as answer:
                assert answer.status in (400, 404, 501), value
            async with client.post(
                "/lora-adapters", json=[{"id": value, "scale": 1}, {"id": 0, "scale": value}]
            ) as answer:
                assert answer.status == 400, value  # there are no adapters
        await assert_nothing_stays(engine, client)


@N
async def test_integers_in_every_field_of_embeddings_and_reranking(
    tiny_llama: Path, tiny_reranker: Path, n: int
) -> None:
    async with serving(tiny_llama, pooling="mean") as (engine, client):
        await all_asked(client, "/v1/embeddings", n)
        await all_asked(client, "/embeddings", n)
        await assert_nothing_stays(engine, client)
    async with serving(tiny_reranker, n_ctx=512, n_parallel=4) as (engine, client):
        await all_asked(client, "/v1/rerank", n)
        await assert_nothing_stays(engine, client)


@N
async def test_integers_in_every_field_of_every_line_of_a_batch(tiny_llama: Path, n: int) -> None:
    statuses: Counter[int] = Counter()
    async with serving(tiny_llama) as (engine, client):
        work = BatchRequestHandler(OneModel.of(engine, ServerSettings(limits=Limits(max_n=4, max_tokens=8))))
        requests, chance, at_once = (
            RequestBuilder(InputFormat(path=Path("in.jsonl"), kind="jsonl"), URLS),
            random.Random(2),
            asyncio.Semaphore(16),
        )

        async def one(record: Json) -> None:
            item = parse_json_line(1, json.dumps(record).encode(), requests)
            if isinstance(item, JobRequest):
                async with at_once:
                    status = (await asyncio.wait_for(work(item), 60)).status
                assert status in (200, 400), record
                statuses[status] += 1

        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            records = [
                {"custom_id": "a", "url": path, "method": "POST", "body": body_with(path, place, value)}
                for place in places(path)
                for value in integers(chance, n)
            ]
            await asyncio.gather(*map(one, records))
        plain: list[Json] = [
            {"prompt": "abc", "max_tokens": 2, "id": value, "seed": value} for value in integers(chance, n)
        ]
        await asyncio.gather(*map(one, [*plain, *({"prompt": [value]} for value in integers(chance, n))]))
        assert min(statuses[200], statuses[400]) > 20
        await assert_nothing_stays(engine, client)
