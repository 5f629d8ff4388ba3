"""Four models in a folder, memory for two of them: every request is answered, and no stream is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cppbatch.config import EngineConfig
from cppbatch.models.synthetic import LlamaShape
from cppbatch.sizing.sizes import first_beside
from tests.support import tiny_models
from tests.support.server_process import ServerProcess

Json = dict[str, Any]

CLIENTS = 16
SIZES = ("-np", "4", "-c", "2048")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiny models and one with more weights."""
    folder = tmp_path_factory.mktemp("models")
    for i in range(3):
        tiny_models.llama(folder / f"tiny-{i}.gguf", seed=i)
    tiny_models.llama(folder / "large.gguf", shape=LlamaShape(n_layer=8, n_embd=256, n_ff=512))
    return folder


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """It may use the memory of the large model and a tiny one."""
    needs = [
        first_beside(
            [EngineConfig(str(folder / name), n_ctx=2048, n_parallel=4)], [], [], engines=lambda one: [one]
        ).needs
        for name in ("large.gguf", "tiny-0.gguf")
    ]
    memory = sum(needs) + needs[1] // 2 >> 20
    flags = ("--models-dir", folder, "--models-memory", str(memory), "--data-dir", tmp_path, *SIZES)
    with ServerProcess(*flags, "--no-access-log") as process:
        yield process.wait_ready()


class Load:
    """Requests of many clients. A stream must end with the tokens that it asked for."""

    def __init__(self, url: str, seed: int, n: int = 200) -> None:
        self._url, self._random = url, random.Random(seed)
        self._left = n
        self.answered: dict[str, int] = {}
        self.wrong: list[str] = []

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=150)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session) for _ in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while self._left > 0:
            self._left -= 1
            model = self._random.choice(("tiny-0", "tiny-1", "tiny-2", "large"))
            n = self._random.randint(2, 24)
            body = {"model": model, "prompt": f"{self._left}:", "max_tokens": n, "ignore_eos": True, "stream": True}
            try:
                await self._stream(session, body | {"stream_options": {"include_usage": True}}, model, n)
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
                self.wrong.append(f"{model}: {type(error).__name__} {error}")

    async def _stream(self, session: aiohttp.ClientSession, body: Json, model: str, n: int) -> None:
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                self.wrong.append(f"{model}: {response.status} {await response.text()}")
                return
            rows = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
        chunks: list[Json] = [json.loads(row) for row in rows[:-1]]
        usage: Json = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), {})
        if rows[-1:] != [b"[DONE]"] or usage.get("completion_tokens") != n or chunks[0]["model"] != model:
            self.wrong.append(f"{model}: cut off: {rows[-3:]}")
        else:
            self.answered[model] = self.answered.get(model, 0) + 1


async def loads_and_evictions(url: str) -> tuple[float, float]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    samples = [sample for family in families for sample in family.samples]
    loads = sum(sample.value for sample in samples if sample.name == "cppbatch_model_loads_total")
    evicted = sum(
        sample.value
        for sample in samples
        if sample.name == "cppbatch_model_unloads_total" and sample.labels["reason"] == "evicted"
    )
    return loads, evicted


@pytest.mark.parametrize("n", [40, pytest.param(200, marks=pytest.mark.soak)])
async def test_requests_for_four_models_with_memory_for_two(server: ServerProcess, n: int) -> None:
    load = Load(server.url, 1, n)
    await load.run()
    loads, evicted = await loads_and_evictions(server.url)
    print(f"{loads:.0f} loads, {evicted:.0f} evictions, {load.answered}")
    assert not load.wrong
    assert sum(load.answered.values()) == n
    assert loads > 4
    assert 0 < evicted < loads


@pytest.mark.soak
async def test_the_same_while_a_worker_is_killed_every_5_seconds(server: ServerProcess) -> None:
    killed = 0

    async def kill_workers() -> None:
        nonlocal killed
        chosen = random.Random(2)
        while True:
            await asyncio.sleep(5)
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                chosen.choice(server.workers).kill()
                killed += 1

    for seed in (1, 2):
        load = Load(server.url, seed)
        killing = asyncio.create_task(kill_workers())
        try:
            await load.run()
        finally:
            killing.cancel()
        print(f"{killed} workers killed, {await loads_and_evictions(server.url)} loads and evictions, {load.answered}")
        assert not load.wrong
        assert sum(load.answered.values()) == 200
    assert killed >= 4


def test_a_yaml_file_of_llama_cpp_pythons_server_is_served(folder: Path, tmp_path: Path) -> None:
    """Two models, the key and the default of `python -m llama_cpp.server --config_file`."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "api_key: secret\nmodels:\n"
        f"- {{model: {folder}/tiny-0.gguf, model_alias: first, n_ctx: 128, chat_format: chatml}}\n"
        f"- {{model: {folder}/tiny-1.gguf, model_alias: second, n_ctx: 128}}\n"
    )
    flags = ("--llama-cpp-python-config", config, "--data-dir", tmp_path / "data", "--host", "127.0.0.1")
    with ServerProcess(*flags) as server:
        url = server.wait_ready().url
        for model, answered_by in (("second", "second"), ("first", "first"), ("unknown", "first")):
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=30)
            request.add_header("Authorization", "Bearer secret")
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["model"] == answered_by
