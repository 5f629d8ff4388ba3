"""API keys with rules, over HTTP: their permissions, and what they share with other keys."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData

from cppbatch import GenerationEvent, GenerationRequest, LocalEngine
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.auth.key_file import read_keys
from cppbatch.server.auth.rules import Keys
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import open_storage
from tests.support.http_client import Http, http_to
from tests.support.listening import HeldEngine, until
from tests.support.lora_files import write_lora

Json = dict[str, Any]

FILE = """
[tiers.paid]
priority = -10

[[keys]]
key = "key-of-alice"
name = "alice"

[[keys]]
key = "key-of-bob"
name = "bob"
tier = "paid"

[[keys]]
key = "key-of-carol"
name = "carol"
group = "team"

[[keys]]
key = "key-of-dave"
name = "dave"
group = "team"

[[keys]]
key = "key-of-eve"
name = "eve"
requests_per_minute = 2

[[keys]]
key = "key-of-frank"
name = "frank"
max_concurrent = 1

[[keys]]
key = "key-of-grace"
name = "grace"
models = ["another-model"]

[[keys]]
key = "key-of-heidi"
name = "heidi"
models = ["tiny-llama"]
adapters = ["style"]

[[keys]]
key = "key-of-ivan"
name = "ivan"
requests_per_minute = 120
max_concurrent = 4
"""
NAMES = ["alice", "bob", "carol", "dave", "eve", "frank", "grace", "heidi", "ivan"]
PROMPT = "The river floods every spring and the people rebuild the bridge. " * 4
SHORT: Json = {"prompt": "Hello", "max_tokens": 2}
MESSAGES = [{"role": "user", "content": "Hello"}]


class RecordingEngine(LocalEngine):
    """Remembers the requests that it got."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.submitted: list[GenerationRequest] = []

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.submitted.append(request)
        async for event in super().submit(request):
            yield event


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return Keys(read_keys(str(path)))


@pytest.fixture
async def engine(tiny_llama: Path, tmp_path: Path) -> AsyncIterator[RecordingEngine]:
    for i, name in enumerate(("style", "sql")):
        write_lora(tmp_path / f"{name}.gguf", seed=i)
    lora = ((str(tmp_path / "style.gguf"), 0.0), (str(tmp_path / "sql.gguf"), 0.0))
    async with RecordingEngine(tiny_llama, n_ctx=2048, n_parallel=4, n_threads=1, lora=lora) as engine:
        yield engine


@pytest.fixture
async def http(engine: RecordingEngine, keys: Keys, tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(engine, keys, tmp_path / "data") as http:
        yield http


def serving(engine: LocalEngine, keys: Keys, folder: Path | None = None, **limits: Any) -> Http:
    settings = ServerSettings(keys=keys, limits=Limits(**limits), predict_path="/predict")
    storage = open_storage(folder, URLS) if folder else None
    return http_to(engine, settings, storage)


async def ask(http: Http, key: str, path: str, body: object, **headers: str) -> tuple[int, Json, dict[str, str]]:
    async with http.post(path, json=body, headers={"x-api-key": f"key-of-{key}", **headers}) as answer:
        return answer.status, await answer.json(), {name.lower(): value for name, value in answer.headers.items()}


async def get(http: Http, key: str, path: str, **headers: str) -> tuple[int, Json]:
    async with http.get(path, headers={"x-api-key": f"key-of-{key}", **headers}) as answer:
        return answer.status, json.loads(await answer.text())


# --- every route that generates ---------------------------------------------------------------------------------------

GENERATING: dict[str, Json] = {
    "/v1/completions": SHORT,
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 2},
    "/generate": SHORT,
    "/generate/batch": {"prompts": ["Hello", "you"], "max_tokens": 2},
    "/completion": {**SHORT, "t_max_predict_ms": 10_000},
    "/completions": SHORT,
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
    "/v1/embeddings": {"input": "Hello"},
    "/embedding": {"content": "Hello"},
    "/embeddings": {"content": "Hello"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/reranking": {"query": "a", "documents": ["b"]},
    "/v1/reranking": {"query": "a", "documents": ["b"]},
    "/api/chat": {"model": "tiny-llama", "messages": MESSAGES, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"model": "tiny-llama", "prompt": "Hello", "options": {"num_predict": 2}, "stream": False},
    "/api/embed": {"model": "tiny-llama", "input": "Hello"},
    "/api/embeddings": {"model": "tiny-llama", "prompt": "Hello"},
    "/predict": {"instances": [{"@requestFormat": "chatCompletions", "messages": MESSAGES, "max_tokens": 2}]},
}
NOT_GENERATING = {
    "/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens", "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens", "/v1/responses/input_tokens", "/responses/input_tokens", "/v1/files",
    "/slots/{id}", "/v1/batches", "/v1/batches/{id}/cancel", "/props", "/lora-adapters", "/models/load",
    "/models/unload", "/generate/batch/cancel", "/api/show", "/api/pull", "/api/create", "/api/copy", "/api/push",
    "/api/blobs/{digest}", "/file-texts",
}  # fmt: skip


async def test_the_engine_gets_every_request_with_the_salt_and_the_priority_of_its_key(
    http: Http, engine: RecordingEngine
) -> None:
    routes = http.server.app.router.routes()  # type: ignore[attr-defined]
    posts = {route.resource.canonical for route in routes if route.method == "POST" and route.resource}
    assert posts == set(GENERATING) | NOT_GENERATING
    for path, body in GENERATING.items():
        engine.submitted.clear()
        status, answer, _ = await ask(http, "bob", path, body)
        assert engine.submitted or status == 400, (path, answer)  # this model may be unable to embed, or to infill
        assert {(each.cache_salt, each.priority) for each in engine.submitted} <= {(salt_of("key:bob"), -10)}, path
        status, _, _ = await ask(http, "grace", path, body)
        assert status == 403, path


def salt_of(owner: str) -> str:
    return sha256(f"{owner}\n".encode()).hexdigest()


# --- prefixes ---------------------------------------------------------------------------------------------------------


async def test_a_key_finds_prefixes_of_its_group_and_of_no_other_key(http: Http) -> None:
    async def cached(key: str, **fields: Any) -> int:
        body = {"prompt": PROMPT, "max_tokens": 2, **fields}
        _, answer, _ = await ask(http, key, "/v1/completions", body)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached("alice") == 0
    assert await cached("alice") > 100
    assert await cached("bob") == 0
    assert await cached("carol") == 0
    assert await cached("dave") > 100
    assert await cached("dave", cache_salt="mine") == 0
    assert await cached("alice", cache_salt="group:team") == 0


# --- priority, rate, concurrency --------------------------------------------------------------------------------------


async def test_a_better_priority_than_the_keys_is_a_400(http: Http, engine: RecordingEngine) -> None:
    status, answer, _ = await ask(http, "alice", "/v1/completions", {**SHORT, "priority": -1})
    assert (status, answer["error"]["param"]) == (400, "priority")
    status, _, _ = await ask(http, "bob", "/v1/completions", {**SHORT, "priority": 3})
    assert (status, engine.submitted[-1].priority) == (200, -7)


OPENAI = ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests"]
ANTHROPIC = ["anthropic-ratelimit-requests-limit", "anthropic-ratelimit-requests-remaining"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/completion"])
async def test_a_key_over_its_rate_gets_429_in_its_apis_form(http: Http, path: str) -> None:
    is_anthropic = path == "/v1/messages"
    names = ANTHROPIC if is_anthropic else OPENAI
    for remaining in ("1", "0"):
        status, _, headers = await ask(http, "eve", path, GENERATING[path])
        assert (status, [headers[name] for name in names]) == (200, ["2", remaining])
    status, answer, headers = await ask(http, "eve", path, GENERATING[path])
    assert status == 429
    assert 25 <= int(headers["retry-after"]) <= 30
    assert "2 requests per minute" in answer["error"]["message"]
    assert answer["error"]["type"] == "rate_limit_error"
    if is_anthropic:
        assert answer["type"] == "error"
        assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    else:
        assert answer["error"]["code"] == "rate_limit_exceeded"
        assert 25_000 <= int(headers["retry-after-ms"]) <= 30_000
        assert 55 <= float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert (await ask(http, "alice", path, GENERATING[path]))[0] == 200
    assert (await get(http, "eve", "/v1/models"))[0] == 200  # only requests that start work count


async def test_the_limit_of_a_key_replaces_that_of_the_server(tiny_llama: Path, keys: Keys) -> None:
    async with (
        HeldEngine(tiny_llama, n_ctx=512, n_parallel=4, n_threads=1) as engine,
        serving(engine, keys, max_concurrent_per_key=2) as http,
    ):
        running = [asyncio.create_task(ask(http, key, "/v1/completions", SHORT)) for key in ("frank", "alice", "alice")]
        await until(lambda: engine.n_held == 3)
        for key, limit in (("frank", "max_concurrent of your key"), ("alice", "--max-concurrent-per-key")):
            status, answer, headers = await ask(http, key, "/v1/completions", SHORT)
            assert (status, headers["retry-after"], answer["error"]["code"]) == (429, "1", "too_many_requests")
            assert limit in answer["error"]["message"]
        engine.go_on.set()
        assert [status for status, _, _ in await asyncio.gather(*running)] == [200] * 3


# --- models and adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize", "/v1/batches"])
async def test_a_key_of_other_models_gets_403_in_its_apis_form(http: Http, path: str) -> None:
    status, answer, _ = await ask(http, "grace", path, GENERATING.get(path, {}))
    assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert "'another-model'" in answer["error"]["message"]


async def test_a_key_of_this_model_may_name_it_and_no_other(http: Http) -> None:
    for name, expected in (("tiny-llama", 200), ("gpt-4o", 403)):
        status, _, _ = await ask(http, "heidi", "/v1/completions", {**SHORT, "model": name})
        assert status == expected
    assert (await ask(http, "alice", "/v1/completions", {**SHORT, "model": "gpt-4o"}))[0] == 200


async def test_a_key_sees_only_models_that_it_may_use(http: Http) -> None:
    for key, ids in (("grace", []), ("heidi", ["tiny-llama"]), ("alice", ["tiny-llama"])):
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            _, answer = await get(http, key, "/v1/models", **headers)
            assert [model["id"] for model in answer["data"]] == ids
        assert (await get(http, key, "/v1/models/tiny-llama"))[0] == (200 if ids else 404)


async def test_a_key_uses_only_its_adapters(http: Http) -> None:
    for lora, expected in (({"style": 1}, 200), ({}, 200), ({"sql": 1}, 403), ([{"id": 1, "scale": 1}], 403)):
        status, answer, _ = await ask(http, "heidi", "/v1/completions", {**SHORT, "lora": lora})
        assert status == expected
        assert expected == 200 or answer["error"]["param"] == "lora"
    prompts = [{"prompt": "a", "lora": {"sql": 1}}, {"prompt": "a", "model": "gpt-4o"}, "a"]
    status, answer, _ = await ask(http, "heidi", "/generate/batch", {"prompts": prompts, "max_tokens": 2})
    assert (status, answer["failed"]) == (200, 2)
    assert [result["error"]["param"] for result in answer["results"][:2]] == ["prompts[0].lora", "prompts[1].model"]
    assert (await ask(http, "heidi", "/lora-adapters", [{"id": 1, "scale": 1}]))[0] == 403
    assert (await ask(http, "alice", "/lora-adapters", [{"id": 1, "scale": 1}]))[0] == 200
    assert (await ask(http, "heidi", "/v1/completions", SHORT))[0] == 403  # the server's own are not for this key


# --- files and batches ------------------------------------------------------------------------------------------------


async def upload(http: Http, key: str, n: int, **fields: Any) -> str:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": SHORT | fields} for i in range(n)
    ]
    form = FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", "\n".join(map(json.dumps, lines)), filename="in.jsonl")
    async with http.post("/v1/files", data=form, headers={"x-api-key": f"key-of-{key}"}) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["id"])


async def start_batch(http: Http, key: str, file_id: str) -> tuple[int, Json]:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    status, answer, _ = await ask(http, key, "/v1/batches", body)
    return status, answer


async def finished(http: Http, key: str, batch_id: str, is_enough: Callable[[Json], bool] | None = None) -> Json:
    for _ in range(2000):
        _, batch = await get(http, key, f"/v1/batches/{batch_id}")
        if is_enough(batch) if is_enough else batch["status"] == "completed":
            return batch
        await asyncio.sleep(0.01)
    raise AssertionError(f"it is still {batch['status']}: {batch['request_counts']}")


async def test_files_and_batches_are_seen_by_the_group_of_their_key_only(http: Http) -> None:
    file_id = await upload(http, "carol", 3)
    _, batch = await start_batch(http, "carol", file_id)
    batch = await finished(http, "dave", batch["id"])
    paths = [f"/v1/files/{file_id}", f"/v1/files/{batch['output_file_id']}/content", f"/v1/batches/{batch['id']}"]
    for path in paths[::2]:
        assert (await get(http, "dave", path))[0] == 200
    for path in (*paths, f"/v1/files/{batch['output_file_id']}"):
        assert (await get(http, "alice", path))[0] == 404
    for key, n_files in (("carol", 2), ("dave", 2), ("alice", 0)):
        for kind, n in (("files", n_files), ("batches", n_files // 2)):
            _, answer = await get(http, key, f"/v1/{kind}")
            assert len(answer["data"]) == n
    assert (await start_batch(http, "alice", file_id))[0] == 400
    assert (await get(http, "alice", f"/v1/files?after={file_id}"))[0] == 400
    assert (await ask(http, "alice", f"/v1/batches/{batch['id']}/cancel", {}))[0] == 404
    for key, status in (("alice", 404), ("dave", 200)):
        async with http.delete(f"/v1/files/{file_id}", headers={"x-api-key": f"key-of-{key}"}) as deleted:
            assert deleted.status == status


async def test_the_lines_of_a_batch_have_the_rules_of_its_key(http: Http, engine: RecordingEngine) -> None:
    _, batch = await start_batch(http, "heidi", await upload(http, "heidi", 2, priority=-5))
    batch = await finished(http, "heidi", batch["id"])
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert {(each.cache_salt, each.priority) for each in engine.submitted} == {(salt_of("key:heidi"), 100)}
    for fields in ({"lora": {"sql": 1}}, {"model": "gpt-4o"}):
        _, batch = await start_batch(http, "heidi", await upload(http, "heidi", 2, **fields))
        batch = await finished(http, "heidi", batch["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}


async def test_a_batch_keeps_the_rules_of_its_key_over_a_restart(tiny_llama: Path, keys: Keys, tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with HeldEngine(tiny_llama, n_ctx=512, n_parallel=4, n_threads=1) as held, serving(held, keys, data) as http:
        _, batch = await start_batch(http, "carol", await upload(http, "carol", 3))
        await until(lambda: held.n_held > 0)
    async with (
        RecordingEngine(tiny_llama, n_ctx=512, n_parallel=4, n_threads=1) as engine,
        serving(engine, keys, data) as http,
    ):
        assert (await get(http, "alice", f"/v1/batches/{batch['id']}"))[0] == 404
        await finished(http, "dave", batch["id"])
        assert {each.cache_salt for each in engine.submitted} == {salt_of("group:team")}


async def test_the_lines_of_a_batch_leave_half_of_the_slots_of_their_key_free(
    tiny_llama: Path, keys: Keys, tmp_path: Path
) -> None:
    async with (
        HeldEngine(tiny_llama, n_ctx=512, n_parallel=8, n_threads=1) as engine,
        serving(engine, keys, tmp_path / "data") as http,
    ):
        await start_batch(http, "ivan", await upload(http, "ivan", 20))
        await until(lambda: engine.n_held == 2)
        await start_batch(http, "alice", await upload(http, "alice", 3))  # does not wait for the slots of another key
        await until(lambda: engine.n_held == 5)
        asked = asyncio.create_task(ask(http, "ivan", "/v1/completions", SHORT))
        await until(lambda: engine.n_held == 6)
        engine.go_on.set()
        assert (await asked)[0] == 200


async def test_the_lines_of_a_batch_count_in_the_rate_of_their_key(http: Http) -> None:
    began = time.monotonic()
    _, batch = await start_batch(http, "ivan", await upload(http, "ivan", 70))
    batch = await finished(http, "ivan", batch["id"], lambda batch: batch["request_counts"]["completed"] >= 58)
    seconds = time.monotonic() - began
    assert batch["request_counts"]["completed"] <= 60 + 2 * seconds  # half of a minute's requests, and 2 per second
    status, _, headers = await ask(http, "ivan", "/v1/completions", SHORT)
    assert status == 200
    assert 50 <= int(headers["x-ratelimit-remaining-requests"]) <= 60 + 2 * seconds
