"""Models of a preset that are on a hub or at an address: downloaded when they are first used, and not at the start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cppbatch.cli.model_sources import Catalog, ModelSources
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.server.settings import ServerSettings
from tests.integration.test_many_models import serve, states, wait_for
from tests.support.fake_hub import FakeHub
from tests.support.http_client import Http, get, post

PRESET = """
[one]
hf = owner/Tiny-GGUF:Q8_0

[two]
hf = owner/Tiny-GGUF:Q4_0

[none]
hf = owner/none-GGUF
"""
SIZES = EngineConfig("", n_ctx=256, n_parallel=1, n_threads=1)


class SlowHub(FakeHub):
    """Sends no file until `is_open` is set."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_open = threading.Event()

    def answer(self, request: Any) -> None:
        if request.command == "GET" and "/resolve/" in request.path:
            assert self.is_open.wait(60)
        super().answer(request)


@pytest.fixture
def hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowHub]:
    files = {f"Tiny-{kind}.gguf": tiny_llama.read_bytes() for kind in ("Q4_0", "Q8_0")}
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path / "models"))
    hub = SlowHub({"owner/Tiny-GGUF": files})
    with hub.running():
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
        hub.is_open.set()


@asynccontextmanager
async def serving(folder: Path, preset: str = PRESET, **options: Any) -> AsyncIterator[Http]:
    file = folder / "models.ini"
    file.write_text(preset)
    sizes = {"n_ctx", "n_parallel", "n_threads"}
    catalog = Catalog(ModelSources(settings_file=file), SIZES, sizes, Deployment(), ServerSettings())
    async with serve(folder, catalog=catalog, **options) as http:
        yield http


async def complete(http: Http, model: str, **fields: Any) -> tuple[int, Any]:
    return await post(http, "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1, **fields})


async def test_a_model_is_downloaded_when_it_is_first_used_while_others_answer(hub: SlowHub, tmp_path: Path) -> None:
    hub.is_open.set()
    async with serving(tmp_path) as http:
        assert set((await states(http)).values()) == {"unloaded"}
        assert hub.requests == []
        assert (await complete(http, "one"))[0] == 200
        hub.is_open.clear()
        first, second = (asyncio.ensure_future(complete(http, "two")) for _ in range(2))
        await wait_for(http, "two", "downloading")
        assert (await complete(http, "one"))[0] == 200
        status, answer = await complete(http, "two", timeout=0.2)
        assert (status, answer["error"]["code"]) == (503, "loading")
        hub.is_open.set()
        assert (await first)[0] == (await second)[0] == 200
        assert await states(http) == {"one": "loaded", "two": "loaded", "none": "unloaded"}
        assert sum("GET" in each and "Q4_0" in each for each in hub.requests) == 1
        await get(http, "/models?reload=1")
        assert (await states(http))["two"] == "loaded"


async def test_a_model_that_cannot_be_downloaded_fails_its_requests_with_the_reason(
    hub: SlowHub, tmp_path: Path
) -> None:
    async with serving(tmp_path) as http:
        for _ in range(2):
            status, answer = await complete(http, "none")
            assert (status, answer["error"]["code"]) == (503, "model_load_failed")
            assert "model 'none' could not be downloaded: owner/none-GGUF" in answer["error"]["message"]
        _, answer = await get(http, "/models")
        (model,) = (each for each in answer["data"] if each["id"] == "none")
        assert model["status"]["failed"] is True
        assert "owner/none-GGUF" in model["status"]["error"]


async def test_only_a_load_by_hand_downloads_without_autoload(hub: SlowHub, tmp_path: Path) -> None:
    hub.is_open.set()
    async with serving(tmp_path, autoload=False) as http:
        assert (await complete(http, "one"))[0] == 400
        assert hub.requests == []
        assert (await post(http, "/models/load", {"model": "one"}))[0] == 200
        await wait_for(http, "one", "loaded")


async def test_models_that_load_at_the_start_are_downloaded_then_without_delaying_it(
    hub: SlowHub, tmp_path: Path
) -> None:
    preset = PRESET.replace("Q8_0\n", "Q8_0\npinned = true\n").replace("Q4_0\n", "Q4_0\nload-on-startup = true\n")
    async with serving(tmp_path, preset) as http:
        assert await states(http) == {"one": "downloading", "two": "downloading", "none": "unloaded"}
        hub.is_open.set()
        for name in ("one", "two"):
            await wait_for(http, name, "loaded")


async def test_a_server_ends_in_the_middle_of_a_download(hub: SlowHub, tmp_path: Path) -> None:
    async with serving(tmp_path) as http:
        assert (await post(http, "/models/load", {"model": "one"}))[0] == 200
        await wait_for(http, "one", "downloading")
    file = tmp_path / "models" / "owner" / "Tiny-GGUF" / "Tiny-Q8_0.gguf"
    assert not file.exists()
    hub.is_open.set()
    for _ in range(600):  # its thread does not outlive the hub
        if file.exists():
            break
        await asyncio.sleep(0.05)
