"""Open WebUI: its connection to Ollama, whole, through its own API."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import serve
from tests.clients.serving import KEY, QUESTION, Serving

Json = dict[str, Any]
ASK = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "num_predict": 24}
START_S = 600  # it sets up its database, for minutes on busy cores


class OpenWebUI:
    """The running program, with a user signed in."""

    def __init__(self, url: str) -> None:
        self._url, self._token = url, ""

    def wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                self.call("/health")
                break
            except OSError:
                assert process.poll() is None, "it has ended"
                assert time.monotonic() < end, "it does not get ready"
                time.sleep(0.5)
        user = {"name": "a", "email": "a@example.org", "password": "Secret-123-pass"}
        self._token = self.call("/api/v1/auths/signup", user)["token"]

    def text(self, path: str, body: Json | None = None, method: str | None = None) -> str:
        """An answer. Raises `urllib.error.HTTPError`."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=100) as answer:
            return str(answer.read().decode())

    def call(self, path: str, body: Json | None = None, method: str | None = None) -> Any:
        return json.loads(self.text(path, body, method))

    def lines(self, path: str, body: Json) -> list[Json]:
        return [json.loads(line) for line in self.text(path, body).splitlines() if line]


@pytest.fixture(scope="module")
def ollama_server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(default_model, folder / "base.gguf")
    yield from serve("--models-dir", folder, "-np", "2", "-c", "4096")


@pytest.fixture(scope="module")
def program(ollama_server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWebUI]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = str(tmp_path_factory.mktemp("home"))
    own = {
        "HOME": home, "DATA_DIR": home, "WEBUI_SECRET_KEY": "secret", "OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1",
        "ENABLE_OPENAI_API": "false", "ANONYMIZED_TELEMETRY": "false", "BYPASS_EMBEDDING_AND_RETRIEVAL": "true",
        "RAG_EMBEDDING_ENGINE": "ollama", "OLLAMA_BASE_URL": "http://127.0.0.1:9",
    }  # fmt: skip
    command = [str(Path(sys.executable).with_name("open-webui")), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (Path(home) / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, env={**os.environ, **own}, stdout=log, stderr=log)
    try:
        found = OpenWebUI(f"http://127.0.0.1:{port}")
        found.wait_ready(process)
        found.call("/ollama/verify", {"url": ollama_server.url, "key": KEY})
        settings = {"0": {"enable": True, "key": KEY}}
        connection = {
            "ENABLE_OLLAMA_API": True,
            "OLLAMA_BASE_URLS": [ollama_server.url],
            "OLLAMA_API_CONFIGS": settings,
        }
        found.call("/ollama/config/update", connection)
        yield found
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.timeout(START_S + 100)
def test_the_connection_lists_the_models(program: OpenWebUI, ollama_server: Serving) -> None:
    assert program.call("/ollama/verify", {"url": ollama_server.url, "key": KEY})["version"]
    assert [each["model"] for each in program.call("/ollama/api/tags")["models"]] == ["base"]
    (model,) = program.call("/api/models")["data"]
    assert (model["id"], model["owned_by"]) == ("base", "ollama")
    assert "completion" in program.call("/ollama/api/show", {"model": "base"})["capabilities"]


def test_a_chat_of_its_page_is_the_same_streamed_and_whole(program: OpenWebUI) -> None:
    asked = {"model": "base", "messages": ASK, "params": {"temperature": 0, "num_predict": 24}}
    whole = program.call("/api/chat/completions", {**asked, "stream": False})
    text = whole["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert whole["usage"]["completion_tokens"] > 0
    events = [
        line.removeprefix("data: ")
        for line in program.text("/api/chat/completions", {**asked, "stream": True}).splitlines()
        if line
    ]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


def test_its_proxy_of_ollamas_api(program: OpenWebUI) -> None:
    asked = {"model": "base", "messages": ASK, "options": GREEDY}
    *parts, last = program.lines("/ollama/api/chat", asked)
    assert "Paris" in "".join(part["message"]["content"] for part in parts)
    assert last["done_reason"] == "stop"
    generated = program.call(
        "/ollama/api/generate",
        {"model": "base", "prompt": "One, two, three,", "raw": True, "options": GREEDY, "stream": False},
    )
    assert "four" in generated["response"]
    assert "base" in str(program.call("/ollama/api/ps"))
    compatible = program.call("/ollama/v1/chat/completions", {"model": "base", "messages": ASK, "max_tokens": 8})
    assert compatible["usage"]["completion_tokens"] == 8


def test_models_are_created_unloaded_and_deleted(program: OpenWebUI) -> None:
    steps = program.lines("/ollama/api/create", {"model": "mario", "from": "base", "system": "You are Mario."})
    assert steps[-1] == {"status": "success"}
    assert program.call("/ollama/api/unload", {"model": "base"})["status"] is True
    assert program.lines("/ollama/api/pull", {"model": "base"})[-1] == {"status": "success"}
    with pytest.raises(urllib.error.HTTPError) as caught:
        program.call("/ollama/api/pull", {"model": "no-such-model"})
    assert "Hugging Face" in json.load(caught.value)["detail"]
    program.call("/ollama/api/tags")  # it knows mario from then on
    assert program.call("/ollama/api/delete", {"model": "mario"}, "DELETE") is True
