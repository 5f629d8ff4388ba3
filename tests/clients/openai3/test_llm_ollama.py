"""`llm-ollama`: the plugin that gives `llm` the models of Ollama's API at $OLLAMA_HOST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.serving import KEY, QUESTION, WEATHER_SCHEMA, Serving, check_weather

Llm = Callable[..., str]


@pytest.fixture
def llm(server: Serving, tmp_path: Path) -> Llm:
    environment = {"LLM_USER_PATH": str(tmp_path), "OLLAMA_HOST": server.url, "OLLAMA_API_KEY": KEY}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [Path(sys.executable).with_name("llm"), *arguments], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=100, check=False, env={**os.environ, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_models_of_the_server_answer(llm: Llm) -> None:
    (name,) = [line.split("Ollama: ")[1].split()[0] for line in llm("models").splitlines() if "Ollama: " in line]
    options = ["-m", name, "-o", "temperature", "0", "-o", "num_predict", "24"]
    text = llm(*options, QUESTION)
    assert "Paris" in text
    assert llm(*options, "--no-stream", QUESTION) == text
    filled = llm("-m", name, "-o", "num_predict", "128", "--schema", json.dumps(WEATHER_SCHEMA), "The weather in Oslo?")
    check_weather(json.loads(filled))
