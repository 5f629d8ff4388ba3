"""Models that Ollama's clients pull, create, copy and delete: who may, what every API serves, what is stored."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cppbatch.cli.model_sources import Catalog, ModelSources
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.models.find import files_below
from cppbatch.models.library import library_model
from cppbatch.server.auth.rules import Keys, api_key
from cppbatch.server.models.created import FILE_NAME
from cppbatch.server.settings import ServerSettings
from tests.integration.test_many_models import serve, wait_for
from tests.support import tiny_models, tiny_projectors
from tests.support.fake_hub import FakeHub
from tests.support.fixtures import chat_server
from tests.support.http_client import Http, answered, get, post
from tests.support.media_samples import RED, as_base64
from tests.support.scripted_chat import ChatServer

Json = dict[str, Any]

server = chat_server()

HELLO = [{"role": "user", "content": "hello"}]
SHORT: Json = {"temperature": 0, "num_predict": 6}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("file") / "base.gguf")


@pytest.fixture
def folder(tmp_path: Path, file: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(file, folder / "base.gguf")
    return folder


@pytest.fixture
def hub(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    repositories = {"owner/Tiny-GGUF": {"Tiny-Q8_0.gguf": file.read_bytes()}, "Qwen/Qwen3-0.6B-GGUF": {}}
    repositories["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": file.read_bytes()}
    eyes = tiny_projectors.vision(file.parent / "eyes.gguf").read_bytes()
    repositories["owner/Seeing-GGUF"] = {"Seeing-Q8_0.gguf": file.read_bytes(), "mmproj-F16.gguf": eyes}
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with FakeHub(repositories).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


async def statuses(http: Http, path: str, body: Json) -> list[Json]:
    async with http.post(path, json=body) as answer:
        assert (answer.status, answer.content_type) == (200, "application/x-ndjson"), await answer.text()
        return [json.loads(line) for line in (await answer.text()).splitlines()]


async def read(http: Http, path: str) -> Any:
    status, answer = await get(http, path)
    assert status == 200, answer
    return answer


async def names(http: Http) -> set[str]:
    return {model["name"] for model in (await get(http, "/api/tags"))[1]["models"]}


def downloads() -> list[psutil.Process]:
    """The processes that download for this one."""
    return [child for child in psutil.Process().children() if "cppbatch.models.hub" in child.cmdline()]


async def wait_until(is_so: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


MARIO: Json = {"model": "mario", "from": "base", "system": "You are Mario.", "parameters": {**SHORT, "stop": "zz"}}


async def test_a_created_model_has_a_system_message_and_defaults_in_every_api(folder: Path) -> None:
    async with serve(folder, accepts_models=True) as http:
        assert (await statuses(http, "/api/create", MARIO))[-1] == {"status": "success"}
        with_system = [{"role": "system", "content": "You are Mario."}, *HELLO]
        expected = await answered(
            http, "/v1/chat/completions", {"model": "base", "messages": with_system, "temperature": 0, "max_tokens": 6}
        )
        text = expected["choices"][0]["message"]["content"]
        chat = await answered(http, "/api/chat", {"model": "mario:latest", "messages": HELLO, "stream": False})
        assert (chat["message"]["content"], chat["eval_count"]) == (text, 6)
        again = await answered(http, "/v1/chat/completions", {"model": "mario", "messages": HELLO})
        assert (again["model"], again["choices"][0]["message"]["content"]) == ("mario", text)
        shown = await answered(http, "/api/show", {"model": "mario"})
        assert shown["system"] == "You are Mario."
        assert [line.split() for line in shown["parameters"].splitlines()] == [
            ["temperature", "0.0"], ["num_predict", "6"], ["stop", '"zz"'],
        ]  # fmt: skip
        assert await names(http) == {"base", "mario"}
        assert {model["id"] for model in (await get(http, "/v1/models"))[1]["data"]} == {"base", "mario"}
    async with serve(folder, accepts_models=True) as http:  # it is stored
        assert await names(http) == {"base", "mario"}
        created = await answered(
            http, "/api/create", {"model": "luigi", "from": "mario", "system": "L", "stream": False}
        )
        assert created == {"status": "success"}
        stored = json.loads((folder / FILE_NAME).read_text())
        assert stored["luigi"] == {**stored["mario"], "system": "L"}
        assert stored["luigi"]["base"] == "base"


async def test_models_that_are_created_and_deleted_at_once_are_all_stored(folder: Path) -> None:
    wanted = {f"copy-{i}" for i in range(24)}
    async with serve(folder, accepts_models=True) as http:

        async def copy_and_delete(name: str) -> None:
            for each in (name, f"{name}-gone"):
                async with http.post("/api/copy", json={"source": "base", "destination": each}) as answer:
                    assert answer.status == 200, await answer.text()
            async with http.delete("/api/delete", json={"model": f"{name}-gone"}) as answer:
                assert answer.status == 200, await answer.text()

        await asyncio.gather(*map(copy_and_delete, wanted))
        assert await names(http) == {"base", *wanted}
    assert json.loads((folder / FILE_NAME).read_text()).keys() == wanted


async def test_a_copy_is_another_name_until_it_is_deleted(folder: Path) -> None:
    async with serve(folder, accepts_models=True) as http:
        async with http.post("/api/copy", json={"source": "base", "destination": "other/name:7b"}) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        asked = {"model": "other/name:7b", "prompt": "hello", "options": SHORT, "stream": False}
        copied, own = await answered(http, "/api/generate", asked), {**asked, "model": "base"}
        assert copied["response"] == (await answered(http, "/api/generate", own))["response"]
        assert copied["load_duration"] > 0
        (loaded, other) = (await get(http, "/api/ps"))[1]["models"]
        assert {loaded["name"], other["name"]} == {"base", "other/name:7b"}
        assert (await answered(http, "/api/generate", {"model": "other/name:7b", "keep_alive": 0}))["done"]
        await wait_for(http, "base", "unloaded")
        async with http.delete("/api/delete", json={"model": "other/name:7b"}) as answer:
            assert answer.status == 200
        assert (await post(http, "/api/generate", asked))[0] == 404
        async with http.delete("/api/delete", json={"model": "base"}) as answer:  # a file that a person put there
            assert answer.status == 409
            assert "remove its file from models/" in (await answer.json())["error"]
        assert (folder / "base.gguf").exists()


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/api/create", {"model": "x"}, 400, "from: is required"),
        ("/api/create", {"from": "base"}, 400, "model: is required"),
        ("/api/create", {"model": "../x", "from": "base"}, 400, "model: is '../x'"),
        ("/api/create", {"model": "base", "from": "base"}, 409, "model: 'base' is a file in models/"),
        ("/api/create", {"model": "x", "from": "nothing"}, 404, "model 'nothing' not found"),
        ("/api/create", {"model": "x", "from": "base", "template": "{{ .Prompt }}"}, 400, "template: is not supported"),
        ("/api/create", {"model": "x", "from": "base", "parameters": {"top_p": 7}}, 400, "top_p: is 7"),
        ("/api/copy", {"source": "nothing", "destination": "x"}, 404, "model 'nothing' not found"),
        ("/api/copy", {"source": "base", "destination": "-x"}, 400, "destination: is '-x'"),
        ("/api/pull", {"model": "no-such-model"}, 404, "model 'no-such-model' not found: it is neither"),
        ("/api/push", {"model": "base"}, 400, "model: cannot be pushed"),
        ("/api/blobs/sha256:12", {}, 400, "digest: is refused: files cannot be uploaded"),
    ],
)
async def test_what_cannot_be_done_is_one_sentence(
    folder: Path, path: str, body: Json, status: int, error: str
) -> None:
    async with serve(folder, accepts_models=True) as http:
        answered_status, refused = await post(http, path, body)
        assert (answered_status, refused["error"][: len(error)]) == (status, error)
        assert await names(http) == {"base"}


async def test_a_pulled_model_is_served_under_its_names_and_can_be_deleted(folder: Path, hub: FakeHub) -> None:
    async with serve(folder, accepts_models=True) as http:
        for name, repository in (
            ("hf.co/owner/Tiny-GGUF:Q8_0", "owner/Tiny-GGUF"),
            ("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF"),
        ):
            steps = await statuses(http, "/api/pull", {"model": name})
            (file,) = (folder / repository).glob("*.gguf")
            assert steps[0] == {"status": "pulling manifest"}
            assert steps[-1] == {"status": "success"}
            size = file.stat().st_size
            assert {"status": f"pulling {file.name}", "digest": file.name, "total": size, "completed": size} in steps
            short = name.removeprefix("hf.co/")
            assert {short, file.stem} <= await names(http)
            answer = await answered(
                http, "/api/chat", {"model": name, "messages": HELLO, "options": SHORT, "stream": False}
            )
            assert answer["eval_count"] == 6
            asked = len(hub.requests)
            assert (await answered(http, "/api/pull", {"model": name, "stream": False})) == {"status": "success"}
            assert len(hub.requests) == asked  # it is there
        assert (await statuses(http, "/api/pull", {"model": "owner/Other-GGUF"}))[-1].keys() == {"error"}
        status, refused = await post(http, "/api/pull", {"model": "owner/Other-GGUF", "stream": False})
        assert (status, "owner/Other-GGUF" in refused["error"]) == (400, True)
        async with http.delete("/api/delete", json={"model": "Tiny-Q8_0"}) as answer:
            assert answer.status == 200, await answer.text()
        assert not (folder / "owner/Tiny-GGUF/Tiny-Q8_0.gguf").exists()
        assert await names(http) == {"base", "Qwen3-0.6B-Q8_0", "qwen3:0.6b"}


async def test_a_pulled_model_that_sees_has_its_projector(folder: Path, hub: FakeHub) -> None:
    config = EngineConfig("", n_ctx=1024, n_parallel=2, n_threads=1)
    catalog = Catalog(ModelSources(folder=folder), config, {"n_ctx"}, Deployment(), ServerSettings())
    async with serve(folder, catalog=catalog, accepts_models=True) as http:
        steps = await statuses(http, "/api/pull", {"model": "owner/Seeing-GGUF"})
        for name, content in hub.repositories["owner/Seeing-GGUF"].items():
            size = len(content)
            assert {"status": f"pulling {name}", "digest": name, "total": size, "completed": size} in steps
        shown = await answered(http, "/api/show", {"model": "owner/Seeing-GGUF"})
        assert "vision" in shown["capabilities"]
        assert (await get(http, "/api/ps"))[1] == {"models": []}, "although it has not been loaded"
        image = {"role": "user", "content": "what?", "images": [as_base64(RED)]}
        asked = {"model": "owner/Seeing-GGUF", "messages": [image], "options": SHORT, "stream": False}
        assert (await answered(http, "/api/chat", asked))["eval_count"] == 6
        async with http.delete("/api/delete", json={"model": "Seeing-Q8_0"}) as answer:
            assert answer.status == 200, await answer.text()
        assert not [*files_below(folder / "owner")]


async def test_the_hub_is_searched_and_a_file_is_judged_before_its_download_as_after_it(
    folder: Path, hub: FakeHub
) -> None:
    content = hub.repositories["owner/Tiny-GGUF"]["Tiny-Q8_0.gguf"]
    async with serve(folder, accepts_models=True) as http:
        found = await read(http, "/models/hub?search=tiny+gguf")
        assert found == {"data": [{"id": "owner/Tiny-GGUF", "downloads": 1200, "likes": 7}]}
        listed = await read(http, "/models/hub/owner/Tiny-GGUF")
        name = "owner/Tiny-GGUF:Tiny-Q8_0.gguf"
        entry = {"model": name, "file": "Tiny-Q8_0.gguf", "weights": "Q8_0", "size": len(content)}
        assert listed["data"] == [{**entry, "default": True, "here": False}]
        assert listed["free_disk"] > 0 < listed["free_memory"]
        before = (await read(http, "/models/hub/owner/Tiny-GGUF?fit=Tiny-Q8_0.gguf"))["fit"]
        assert not (folder / "owner").exists(), "nothing was kept"
        assert (await statuses(http, "/api/pull", {"model": name}))[-1] == {"status": "success"}
        models = (await read(http, "/v1/models?fit=true"))["data"]
        fits = {model["id"]: (model["fit"], model.get("deletable")) for model in models}
        assert fits == {"base": (before, None), "Tiny-Q8_0": (before, "file"), name: (before, "name")}
        assert before == "yes"
        assert (await read(http, "/models/hub/owner/Tiny-GGUF"))["data"][0]["here"]


async def test_a_download_stops_when_its_client_leaves_and_leaves_nothing_behind(folder: Path, hub: FakeHub) -> None:
    hub.hold = threading.Event()
    content = hub.repositories["owner/Tiny-GGUF"]["Tiny-Q8_0.gguf"]
    pulled = folder / "owner/Tiny-GGUF/Tiny-Q8_0.gguf"
    async with serve(folder, accepts_models=True) as http:
        async with http.post("/api/pull", json={"model": "owner/Tiny-GGUF"}) as answer:
            async for line in answer.content:
                if "total" in json.loads(line):
                    break
            await wait_until(downloads)
        await wait_until(lambda: not downloads())
        hub.hold.set()
        await wait_until(lambda: not [*pulled.parent.iterdir()])
        assert (await statuses(http, "/api/pull", {"model": "owner/Tiny-GGUF"}))[-1] == {"status": "success"}
        assert await asyncio.to_thread(pulled.read_bytes) == content


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/models/hub?search=tiny", "search: the hub cannot be searched, because HF_HUB_OFFLINE is set: unset it"),
        ("/models/hub/owner/Tiny-GGUF", "repository: owner/Tiny-GGUF has not been downloaded, and HF_HUB_OFFLINE is"),
        ("/models/hub/nothing", "repository: is 'nothing'; it must be OWNER/REPO"),
    ],
)
async def test_a_hub_that_is_out_of_reach_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, error: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    async with serve(folder, accepts_models=True) as http:
        status, refused = await get(http, path)
        assert (status, refused["error"]["message"][: len(error)]) == (400, error)


async def test_a_hub_without_network_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    async with serve(folder, accepts_models=True) as http:
        status, refused = await get(http, "/models/hub?search=tiny")
        assert (status, refused["error"]["message"].count("http://127.0.0.1:1 could not be searched: ")) == (400, 1)
        assert refused["error"]["message"].endswith(". Check the network")


async def test_only_unlimited_keys_and_this_machine_may_change_models(folder: Path) -> None:
    async with serve(folder, accepts_models=True) as http:
        for header in ("X-Forwarded-For", "Via"):  # a proxy on this machine
            status, refused = await post(http, "/api/create", MARIO, headers={header: "10.0.0.7"})
            assert (status, "start it with --api-key" in refused["error"]) == (403, True)
            assert (await get(http, "/models/hub?search=x", headers={header: "10.0.0.7"}))[0] == 403
    keys = Keys([api_key("sk-all", name="all"), api_key("sk-base", name="one", models=("base",))])
    async with serve(folder, settings={"keys": keys}, accepts_models=True) as http:
        limited, free = ({"Authorization": f"Bearer {key}"} for key in ("sk-base", "sk-all"))
        assert (await post(http, "/api/create", MARIO, headers=limited))[0] == 403
        assert (await post(http, "/api/create", {**MARIO, "stream": False}, headers=free))[0] == 200
        asked = {"model": "mario", "messages": HELLO, "stream": False}
        assert (await post(http, "/api/chat", asked, headers=limited))[0] == 200  # it may use what it is made from


async def test_a_damaged_list_of_created_models_is_kept_and_the_files_are_served(folder: Path) -> None:
    (folder / FILE_NAME).write_text("{")
    async with serve(folder, accepts_models=True) as http:
        assert await names(http) == {"base"}
        assert (await post(http, "/api/create", {**MARIO, "stream": False}))[0] in (400, 500)
    assert (folder / FILE_NAME).read_text() == "{"


def test_a_server_of_one_file_says_what_to_do(server: ChatServer) -> None:
    name = server.get("/api/tags")["models"][0]["name"]
    assert server.post("/api/pull", {"model": name, "stream": False}) == {"status": "success"}
    for path, body in (
        ("/api/pull", {"model": "qwen3"}),
        ("/api/create", {"model": "x", "from": name}),
        ("/api/copy", {"source": name, "destination": "x"}),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post(path, body)
        assert caught.value.code == 409
        assert "start it with --models-dir DIR" in json.load(caught.value)["error"]


def test_names_of_ollamas_library() -> None:
    found = {
        name: str(library_model(name)) for name in ("qwen3", "qwen3:0.6b", "llama3.2:1b-instruct-q8_0", "gemma3:4b-it")
    }
    assert found == {
        "qwen3": "Qwen/Qwen3-8B-GGUF",
        "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF",
        "llama3.2:1b-instruct-q8_0": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0",
        "gemma3:4b-it": "ggml-org/gemma-3-4b-it-GGUF",
    }
    assert library_model("nothing") is library_model("qwen3:999b") is None
