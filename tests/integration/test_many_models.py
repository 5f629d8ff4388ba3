"""A server with several tiny models: every API finds the model of a request, loads it, and others are not hurt."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import FormData
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from cppbatch.cli.model_sources import Catalog, ModelSources
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, ModelLoadFailed
from cppbatch.jobs.batches import active_batch
from cppbatch.jobs.job_request import JobRequest
from cppbatch.models.find import models_in, short_name
from cppbatch.server.api.batches.handler import URLS, BatchRequestHandler
from cppbatch.server.app import create_app
from cppbatch.server.auth.rules import Keys, api_key
from cppbatch.server.models import many
from cppbatch.server.models.loader import MemoryPlanLoader, ModelSpec
from cppbatch.server.models.many import CatalogContent, ManyModels
from cppbatch.server.models.served import MODELS
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import open_storage
from tests.support import tiny_models
from tests.support.http_client import Http, get, post
from tests.support.mutated_files import decode

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "Hello"}]

GENERATING: dict[str, Json] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/completion": {"prompt": "ab", "n_predict": 2},
    "/generate": {"prompt": "ab", "max_tokens": 2},
    "/generate/batch": {"prompts": ["ab", "cd"], "max_tokens": 2},
}
COUNTING: dict[str, Json] = {
    "/tokenize": {"content": "ab"},
    "/detokenize": {"tokens": [70]},
    "/apply-template": {"messages": HELLO},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
}
ABOUT = ("/props", "/slots", "/lora-adapters", "/tokenizer_info")


class FolderCatalog:
    """The models of a folder. `changes`: fields of the specs by model."""

    def __init__(
        self, folder: Path, settings: ServerSettings, default: str | None, deployment: Deployment, **changes: Json
    ) -> None:
        self.folder, self.settings, self.default, self.changes = folder, settings, default, changes
        self.deployment = deployment

    def read(self) -> CatalogContent:
        return CatalogContent([self._spec(path) for path in models_in(self.folder)], self.default)

    def fetch(self, name: str) -> None:
        raise AssertionError(f"{name} is here")

    def _spec(self, path: Path) -> ModelSpec:
        name, status = short_name(path), path.stat()
        fields = {"settings": self.settings, **self.changes.get(name.replace("-", "_"), {})}
        return ModelSpec(
            name=name,
            config=EngineConfig(str(path), n_ctx=1024, n_parallel=2, n_threads=1),
            given=frozenset({"n_ctx", "n_parallel", "n_threads"}),
            file_version=(status.st_mtime_ns, status.st_size),
            deployment=self.deployment,
            **fields,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that generate, and one that embeds."""
    folder = tmp_path_factory.mktemp("models")
    for i, name in enumerate(("one", "two")):
        tiny_models.llama(folder / f"{name}.gguf", seed=i)
    tiny_models.encoder_only(folder / "vectors.gguf")
    return folder


@asynccontextmanager
async def serve(
    folder: Path,
    *,
    default: str | None = None,
    data: Path | None = None,
    settings: Json | None = None,
    changes: dict[str, Json] | None = None,
    memory: int | None = None,
    catalog: Catalog | None = None,
    accepts_models: bool = False,
    in_process: bool = True,
    memory_check: bool = False,
    **options: Any,
) -> AsyncIterator[Http]:
    """A server of these models. `in_process`: no worker processes, except those of `catalog`. `memory_check`: child
    processes estimate what the models need."""
    shared, deployment = ServerSettings(**(settings or {})), Deployment(in_process=in_process)
    of_folder = catalog or FolderCatalog(folder, shared, default, deployment, **(changes or {}))
    loader = MemoryPlanLoader(use_profiles=False, memory_check=memory_check, budget=memory)
    models = ManyModels(of_folder, shared, loader, folder=folder if accepts_models else None, **options)
    try:
        app = create_app(models, storage=open_storage(data, URLS) if data else None)
        async with TestClient(TestServer(app)) as http:
            yield http
    finally:
        await models.close()


async def states(http: Http) -> dict[str, str]:
    _, answer = await get(http, "/models")
    return {model["id"]: model["status"]["value"] for model in answer["data"]}


async def wait_for(http: Http, name: str, state: str) -> None:
    for _ in range(600):
        if (await states(http))[name] == state:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} does not become {state}: {await states(http)}")


async def metrics(http: Http) -> dict[tuple[str, ...], float]:
    """Samples by name and labels `model`, `reason`."""
    async with http.get("/metrics") as answer:
        text = await answer.text()
    return {
        (sample.name, *(sample.labels[label] for label in ("model", "reason") if label in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_every_api_answers_with_the_model_that_the_request_names(folder: Path) -> None:
    async with serve(folder, in_process=False, memory_check=True) as http:
        for name in ("two", "one"):
            for path, body in GENERATING.items():
                status, answer = await post(http, path, {**body, "model": name})
                assert status == 200, (path, answer)
                assert answer.get("model", name) == name, path
            for path, body in COUNTING.items():
                assert (await post(http, path, {**body, "model": name}))[0] == 200, path
            for path in ABOUT:
                assert (await get(http, f"{path}?model={name}"))[0] == 200, path
            assert (await get(http, f"/props?model={name}"))[1]["model_alias"] == name
        status, answer = await post(http, "/v1/embeddings", {"input": "hello", "model": "vectors"})
        assert (status, answer["model"]) == (200, "vectors")
        assert await states(http) == {"one": "loaded", "two": "loaded", "vectors": "loaded"}
        seen = await metrics(http)
        assert [seen["cppbatch_model_loads_total", name] for name in ("one", "two", "vectors")] == [1, 1, 1]
        assert seen["cppbatch_completions_total", "one"] >= 1
        assert seen["cppbatch_worker_up", "two"] == 1


async def test_a_model_must_be_known_and_named(folder: Path) -> None:
    async with serve(folder) as http:
        chat = GENERATING["/v1/chat/completions"]
        status, answer = await post(http, "/v1/chat/completions", {**chat, "model": "three"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "'one', 'two', 'vectors'" in answer["error"]["message"]
        status, answer = await post(http, "/v1/chat/completions", chat)
        assert (status, answer["error"]["param"]) == (400, "model")
        status, answer = await get(http, "/props")
        assert (status, answer["role"], answer["models_autoload"]) == (200, "router", True)
        assert set((await states(http)).values()) == {"unloaded"}


async def test_the_default_model_answers_requests_without_a_model_and_with_any_model_unknown_names(
    folder: Path,
) -> None:
    async with serve(folder, default="two", any_model=True) as http:
        chat = GENERATING["/v1/chat/completions"]
        for body in (chat, {**chat, "model": "gpt-9"}):
            assert (await post(http, "/v1/chat/completions", body))[1]["model"] == "two"
        assert (await get(http, "/v1/models/gpt-9"))[0] == 404


async def test_changes_of_the_models_states_are_events(folder: Path) -> None:
    async with serve(folder) as http, http.get("/models/sse") as events:
        await post(http, "/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "two"})
        found: list[Json] = []
        while not any(event["data"]["value"] == "loaded" for event in found):
            line = await asyncio.wait_for(events.content.readline(), 30)
            found += [json.loads(line.removeprefix(b"data: "))] if line.startswith(b"data: ") else []
        assert {(event["model"], event["event"]) for event in found} == {("two", "model_status")}


async def test_unloaded_models_are_listed_with_what_their_files_say(folder: Path) -> None:
    async with serve(
        folder, changes={"two": {"settings": ServerSettings(aliases=("gpt-4",), tags=("small",))}}
    ) as http:
        _, answer = await get(http, "/v1/models")
        by_name = {model["id"]: model for model in answer["data"]}
        assert by_name["two"]["aliases"] == ["gpt-4"]
        assert by_name["two"]["meta"]["n_ctx_train"] == 4096
        assert "n_ctx" not in by_name["two"]["meta"]
        assert by_name["vectors"]["meta"]["pooling"] == "mean"
        status, answer = await post(http, "/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "gpt-4"})
        assert (status, answer["model"]) == (200, "two")
        assert (await get(http, "/v1/models/two"))[1]["meta"]["n_ctx"] == 1024
        _, answer = await get(http, "/v1/models?limit=2", headers={"anthropic-version": "2023-06-01"})
        assert ([model["id"] for model in answer["data"]], answer["has_more"]) == (["one", "two"], True)


async def test_models_are_loaded_and_unloaded_by_hand(folder: Path) -> None:
    async with serve(folder, autoload=False) as http:
        body = {"prompt": "a", "max_tokens": 1, "model": "one"}
        status, answer = await post(http, "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "model_not_loaded")
        assert (await post(http, "/models/load", {"model": "one"})) == (200, {"success": True})
        await wait_for(http, "one", "loaded")
        assert (await post(http, "/v1/completions", body))[0] == 200
        assert (await post(http, "/v1/completions?autoload=true", {**body, "model": "two"}))[0] == 200
        assert (await post(http, "/models/unload", {"model": "one"})) == (200, {"success": True})
        await wait_for(http, "one", "unloaded")
        assert (await post(http, "/models/load", {"model": "three"}))[0] == 404
        assert (await metrics(http))["cppbatch_model_unloads_total", "one", "asked"] == 1


async def next_worker() -> psutil.Process:
    """Stops the next worker when it starts: its load hangs, as with a disk that does not respond."""
    known = psutil.Process().children()
    while True:
        for child in psutil.Process().children():
            if child not in known and any("worker.main" in part for part in child.cmdline()):
                child.suspend()
                return child
        await asyncio.sleep(0.001)


@pytest.mark.skipif(sys.platform == "win32", reason="stops a process")
@pytest.mark.parametrize("how", ["the client leaves", "unload"])
async def test_a_load_that_hangs_is_stopped_and_other_models_are_served(folder: Path, how: str) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    async with serve(folder, in_process=False) as http:
        starting = asyncio.create_task(next_worker())
        client = asyncio.create_task(post(http, "/v1/completions", {**body, "model": "one"}))
        worker = await asyncio.wait_for(starting, 30)
        assert await states(http) == {"one": "loading", "two": "unloaded", "vectors": "unloaded"}
        if how == "unload":
            assert (await post(http, "/models/unload", {"model": "one"})) == (200, {"success": True})
            status, answer = await client
            assert (status, answer["error"]["code"]) == (503, "model_load_failed")
            assert "was unloaded while it was loading" in answer["error"]["message"]
        else:
            client.cancel()
        assert (await post(http, "/v1/completions", {**body, "model": "two"}))[0] == 200
        assert await states(http) == {"one": "unloaded", "two": "loaded", "vectors": "unloaded"}
        assert not worker.is_running()
        assert (await post(http, "/v1/completions", {**body, "model": "one"}))[0] == 200


@pytest.mark.each_value
@pytest.mark.skipif(sys.platform == "win32", reason="stops a process")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("loads", [True, False])
async def test_a_stream_sends_headers_and_pings_while_its_model_loads(folder: Path, path: str, loads: bool) -> None:
    """A large model takes longer to load than proxies wait. A load that fails then ends the stream with an error."""
    body = {**GENERATING[path], "model": "one", "stream": True, "sse_ping_interval": 1}
    async with serve(folder, in_process=False) as http:
        starting = asyncio.create_task(next_worker())
        async with http.post(path, json=body) as answer:
            worker = await asyncio.wait_for(starting, 30)
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            assert await asyncio.wait_for(answer.content.readline(), 10) == b": ping\n"
            if loads:
                worker.resume()
            else:
                assert (await post(http, "/models/unload", {"model": "one"})) == (200, {"success": True})
            rest = (await asyncio.wait_for(answer.content.read(), 60)).decode()
    assert ("was unloaded while it was loading" in rest) == (not loads)
    ends = {"/v1/completions": "data: [DONE]", "/v1/messages": "event: message_stop"}
    assert (ends.get(path, "event: response.incomplete") in rest) == loads
    if not loads:
        assert ("event: error\n" in rest) == (path == "/v1/messages")


async def test_a_stream_is_not_cut_off_when_another_model_needs_its_place(folder: Path) -> None:
    async with serve(folder, max_loaded=1) as http:
        long = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True, "model": "one"}
        long["stream_options"] = {"include_usage": True}
        async with http.post("/v1/completions", json=long) as stream:
            await stream.content.readline()
            other = asyncio.create_task(post(http, "/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "two"}))
            text = (await stream.read()).decode()
        assert text.rstrip().endswith("[DONE]")
        assert '"completion_tokens":300' in text
        assert (await other)[0] == 200
        assert (await states(http))["one"] == "unloaded"


async def test_a_request_waits_for_its_model_at_most_for_its_timeout(folder: Path) -> None:
    async with serve(folder, in_process=False) as http:  # a worker, which takes more than the timeout to start
        body = {"prompt": "a", "max_tokens": 1, "model": "one"}
        for field in ("timeout", "queue_timeout"):
            status, answer = await post(http, "/v1/completions", {**body, field: 0.01})
            assert (status, answer["error"]["code"]) == (503, "loading")
        assert (await post(http, "/v1/completions", {**body, "timeout": 60}))[0] == 200


async def test_a_model_that_cannot_be_loaded_fails_its_own_requests_only(tmp_path: Path) -> None:
    tiny_models.llama(tmp_path / "one.gguf")
    tiny_models.truncated(tmp_path / "broken.gguf")
    async with serve(tmp_path) as http:
        body = {"prompt": "a", "max_tokens": 1}
        broken, good = await asyncio.gather(
            *(post(http, "/v1/completions", {**body, "model": name}) for name in ("broken", "one"))
        )
        assert (broken[0], broken[1]["error"]["code"]) == (503, "model_load_failed")
        assert "Download it again" in broken[1]["error"]["message"]
        assert good[0] == 200
        async with http.post("/v1/completions", json={**body, "model": "broken"}) as again:
            assert int(again.headers["Retry-After"]) >= 1
        _, listed = await get(http, "/v1/models/broken")
        assert (listed["status"]["value"], listed["status"]["failed"]) == ("unloaded", True)
        assert (await get(http, "/health"))[1]["models"] == {"loaded": 1, "loading": 0, "unloaded": 0, "failed": 1}


async def test_files_that_are_no_models_do_not_delay_or_fail_the_list(tmp_path: Path) -> None:
    """They need not be loaded for that; 50,000 dimensions took 24 s of the whole process."""
    file = decode(tiny_models.llama(tmp_path / "one.gguf").read_bytes())
    many = replace(file, tensors=[(b"a.weight", [2**62] * 50_000, 0, 0), *file.tensors])
    (tmp_path / "dimensions.gguf").write_bytes(many.encode())
    tiny_models.llama(tmp_path / "x-00001-of-00000.gguf")
    tiny_models.llama(tmp_path / "y-00001-of-00002.gguf")  # whose second part is missing
    tiny_models.truncated(tmp_path / "truncated.gguf")
    async with serve(tmp_path) as http:
        began = time.process_time()
        status, listed = await get(http, "/v1/models")
        assert (status, len(listed["data"])) == (200, 5)
        assert time.process_time() - began < 2
        facts = {each["id"]: each.get("meta") for each in listed["data"]}
        assert facts["one"] == facts["x-00001-of-00000"] is not None
        status, listed = await get(http, "/v1/models?fit=true")
        fits = {each["id"]: each["fit"] for each in listed["data"]}
        assert (fits["one"], fits["dimensions"], fits["y"]) == ("yes", "?", "?")


async def test_an_error_quotes_a_long_text_of_a_file_cut(tmp_path: Path) -> None:
    file = decode(tiny_models.llama(tmp_path / "one.gguf").read_bytes())
    file.metadata = [
        (key, kind, b"long " * 200_000 if key == b"general.architecture" else value)
        for key, kind, value in file.metadata
    ]
    (tmp_path / "one.gguf").write_bytes(file.encode())
    async with serve(tmp_path) as http:
        async with http.post("/v1/completions", json={"prompt": "a", "model": "one"}) as answer:
            assert answer.status == 503
            assert len(await answer.read()) < 4000
        async with http.get("/v1/models") as listed:
            assert len(await listed.read()) < 6000


async def test_models_are_listed_while_folders_appear_and_vanish(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    tiny_models.llama(folder / "one.gguf")
    catalog = Catalog(ModelSources(folder=folder), EngineConfig(""), set(), Deployment(), ServerSettings())
    has_ended = threading.Event()

    def change() -> None:
        content = (folder / "one.gguf").read_bytes()
        while not has_ended.is_set():
            path = folder / "owner" / "repo" / "other.gguf"
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            shutil.rmtree(folder / "owner")

    changing = threading.Thread(target=change)
    async with serve(folder, catalog=catalog) as http:
        changing.start()
        try:
            for _ in range(100):
                status, listed = await get(http, "/v1/models?reload=1")
                assert status == 200
                assert "one" in [each["id"] for each in listed["data"]]
        finally:
            has_ended.set()
            changing.join()


async def test_the_folder_is_read_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_LOOK_AGAIN_S", 0.05)
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    tiny_models.llama(one)
    async with serve(tmp_path) as http:
        body = {"prompt": "a", "max_tokens": 1}
        assert (await post(http, "/v1/completions", {**body, "model": "one"}))[0] == 200
        tiny_models.llama(two, seed=1)
        await asyncio.sleep(0.1)
        assert (await post(http, "/v1/completions", {**body, "model": "two"}))[0] == 200
        one.unlink()
        tiny_models.llama(two, seed=2)
        _, answer = await get(http, "/models?reload=1")
        assert [model["id"] for model in answer["data"]] == ["two"]
        assert (await post(http, "/v1/completions", {**body, "model": "one"}))[0] == 404
        assert (await post(http, "/v1/completions", {**body, "model": "two"}))[0] == 200


async def test_invalid_settings_leave_the_models_as_they_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_LOOK_AGAIN_S", -1.0)

    def fail(self: FolderCatalog) -> CatalogContent:
        raise ConfigError("models.toml: 'bogus' is unknown")

    async with serve(folder) as http:
        monkeypatch.setattr(FolderCatalog, "read", fail)
        status, answer = await post(http, "/v1/completions", {"prompt": "a", "model": "three"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = await get(http, "/models?reload=1")
        message = "reload: the models are unchanged: models.toml: 'bogus' is unknown"
        assert (status, answer["error"]["message"]) == (400, message)
        assert len(await states(http)) == 3


async def test_a_key_sees_and_uses_only_its_models(folder: Path) -> None:
    keys = Keys([api_key("all"), api_key("some", models=("two",)), api_key("none", models=("other",))])
    async with serve(folder, settings={"keys": keys}) as http:

        def key(name: str) -> Json:
            return {"headers": {"Authorization": f"Bearer {name}"}}

        body = {"prompt": "a", "max_tokens": 1}
        assert (await post(http, "/v1/completions", {**body, "model": "two"}, **key("some")))[0] == 200
        assert (await post(http, "/v1/completions", {**body, "model": "one"}, **key("some")))[0] == 403
        assert (await post(http, "/v1/completions", {**body, "model": "two"}, **key("none")))[0] == 403
        assert (await post(http, "/models/load", {"model": "one"}, **key("some")))[0] == 403
        assert (await post(http, "/models/unload", {"model": "one"}, **key("some")))[0] == 403
        status, answer = await post(http, "/v1/completions", {**body, "model": "new"}, **key("some"))
        assert (status, answer["error"]["message"]) == (404, "model: 'new' not found; available: 'two'")
        for name, seen in (("all", ["one", "two", "vectors"]), ("some", ["two"]), ("none", [])):
            assert [model["id"] for model in (await get(http, "/v1/models", **key(name)))[1]["data"]] == seen
        assert (await get(http, "/v1/models/one", **key("some")))[0] == 404


async def test_the_lines_of_a_batch_name_their_models(folder: Path, tmp_path: Path) -> None:
    def line(i: int, model: str) -> str:
        body = {"prompt": "a", "max_tokens": 1, "model": model}
        return json.dumps({"custom_id": f"{i}-{model}", "method": "POST", "url": "/v1/completions", "body": body})

    names = ("one", "two", "one", "three", "two")
    async with serve(folder, data=tmp_path) as http:
        form = FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(line(i, name) for i, name in enumerate(names)), filename="in.jsonl")
        async with http.post("/v1/files", data=form) as answer:
            file = (await answer.json())["id"]
        request = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        _, batch = await post(http, "/v1/batches", request)
        for _ in range(600):
            _, batch = await get(http, f"/v1/batches/{batch['id']}")
            if batch["status"] == "completed":
                break
            await asyncio.sleep(0.05)
        assert batch["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        async with http.get(f"/v1/files/{batch['output_file_id']}/content") as answer:
            results = [json.loads(row) for row in (await answer.text()).splitlines()]
        assert {row["custom_id"]: row["response"]["body"]["model"] for row in results} == {
            f"{i}-{name}": name for i, name in enumerate(names) if name != "three"
        }


async def test_a_batch_waits_for_its_model_which_answers_its_lines_after_the_default_has_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_batch, "_MODEL_CHECK_S", 0.05)
    is_there = False
    monkeypatch.setattr(ManyModels, "serves_batch", lambda models, model: is_there)
    body = {"prompt": "a", "max_tokens": 1}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    async with serve(folder, data=tmp_path, default="one") as http:
        form = FormData({"purpose": "batch"})
        form.add_field("file", line, filename="in.jsonl")
        async with http.post("/v1/files", data=form) as answer:
            file = (await answer.json())["id"]
        request = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        _, batch = await post(http, "/v1/batches", request)
        assert batch["model"] == "one"
    async with serve(folder, data=tmp_path, default="two") as http:
        await asyncio.sleep(0.2)
        assert (await get(http, f"/v1/batches/{batch['id']}"))[1]["request_counts"]["completed"] == 0
        is_there = True
        for _ in range(600):
            _, batch = await get(http, f"/v1/batches/{batch['id']}")
            if batch["status"] == "completed":
                break
            await asyncio.sleep(0.05)
        async with http.get(f"/v1/files/{batch['output_file_id']}/content") as answer:
            assert json.loads(await answer.text())["response"]["body"]["model"] == "one"


async def test_items_of_one_request_are_for_one_model(folder: Path) -> None:
    async with serve(folder) as http:
        prompts = [{"prompt": "a", "model": name} for name in ("one", "two")]
        status, answer = await post(http, "/generate/batch", {"prompts": prompts, "max_tokens": 1, "model": "one"})
        assert status == 200
        assert [("error" in result) for result in answer["results"]] == [False, True]


async def test_a_model_leaves_after_its_ttl_and_a_pinned_one_stays(folder: Path) -> None:
    changes: dict[str, Json] = {"one": {"ttl": 0.5}, "two": {"ttl": 0.5, "pinned": True}}
    async with serve(folder, changes=changes) as http:
        await wait_for(http, "two", "loaded")
        assert (await post(http, "/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "one"}))[0] == 200
        await wait_for(http, "one", "unloaded")
        assert await states(http) == {"one": "unloaded", "two": "loaded", "vectors": "unloaded"}
        assert (await metrics(http))["cppbatch_model_unloads_total", "one", "idle"] == 1


@pytest.mark.parametrize(("patience", "status"), [(60.0, 200), (0.5, 503), (0.0, 503)])
async def test_lines_of_a_batch_wait_while_their_model_cannot_be_loaded(
    folder: Path, patience: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(folder) as http:
        models = http.server.app[MODELS]  # type: ignore[attr-defined]
        lease, failures = models.lease, [ModelLoadFailed("free memory is short", retry_after=0.1)] * 2

        async def fails_at_first(*args: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return await lease(*args, **options)

        monkeypatch.setattr(models, "lease", fails_at_first)
        handle = BatchRequestHandler(models, load_patience=patience)
        body = {"model": "one", "prompt": "a", "max_tokens": 1}
        answer = await handle(JobRequest(line=1, custom_id="a", url="/v1/completions", body=body, content_hash=0))
        assert answer.status == status


async def test_memory_decides_how_many_models_are_loaded(folder: Path) -> None:
    async with serve(folder, memory_check=True) as http:
        body = {"prompt": "a", "max_tokens": 1}
        assert (await post(http, "/v1/completions", {**body, "model": "one"}))[0] == 200
        need = needs(http, "one")
    async with serve(folder, memory=int(1.5 * need), memory_check=True) as http:
        for name in ("one", "two"):
            assert (await post(http, "/v1/completions", {**body, "model": name}))[0] == 200
        assert await states(http) == {"one": "unloaded", "two": "loaded", "vectors": "unloaded"}
    async with serve(folder, memory=need // 2, memory_check=True) as http:
        status, answer = await post(http, "/v1/completions", {**body, "model": "one"})
        assert (status, answer["error"]["code"]) == (503, "model_load_failed")
        assert "--models-memory" in answer["error"]["message"]


def needs(http: Http, name: str) -> int:
    """Bytes that a loaded model was planned to need."""
    models = http.app[MODELS] if http.app else None
    assert isinstance(models, ManyModels)
    plan = models.pool.models[name].plan
    assert plan
    return plan.sizes.needs
