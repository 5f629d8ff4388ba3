"""`llm`, the command line tool and its Python API, with the server in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.serving import CITIES, KEY, MODEL, QUESTION, WEATHER_SCHEMA, Serving, at_once, check_weather

LLM = Path(sys.executable).with_name("llm")
Llm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def llm(server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Llm:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    common = {"model_name": MODEL, "api_base": server.v1, "api_key_name": "cppbatch", "supports_schema": True}
    models = [
        {**common, "model_id": "chat"},
        {**common, "model_id": "responses", "responses": True},
        {**common, "model_id": "completion", "completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

    def run(*arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [LLM, *arguments, "--key", key],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=dict(os.environ),
        )

    return run


@pytest.mark.parametrize("model", ["chat", "responses"])
def test_a_question_is_answered_and_logged_with_its_tokens(llm: Llm, model: str, tmp_path: Path) -> None:
    options = ["-o", "temperature", "0", "-o", "max_tokens", "24"]
    streamed = llm("-m", model, *options, QUESTION)
    assert streamed.returncode == 0, streamed.stderr
    whole = llm("-m", model, *options, "--no-stream", QUESTION)
    assert "Paris" in streamed.stdout
    assert streamed.stdout == whole.stdout
    with sqlite3.connect(tmp_path / "logs.db") as logs:
        counts = logs.execute("select input_tokens, output_tokens from turns").fetchall()
    assert len(counts) == 2
    assert counts[0] == counts[1]
    assert all(count > 0 for count in counts[0])


def test_a_conversation_continues(llm: Llm) -> None:
    options = ["-m", "chat", "-o", "temperature", "0", "-o", "max_tokens", "24"]
    assert llm(*options, "My name is Zorro.").returncode == 0
    assert "Zorro" in llm(*options, "-c", "What is my name?").stdout


@pytest.mark.parametrize("model", ["chat", "responses"])
def test_the_answer_matches_the_schema(llm: Llm, model: str) -> None:
    done = llm("-m", model, "--schema", json.dumps(WEATHER_SCHEMA), "The weather in Oslo?")
    assert done.returncode == 0, done.stderr
    check_weather(json.loads(done.stdout))


def test_a_completion_continues_a_text(llm: Llm) -> None:
    done = llm("-m", "completion", "-o", "temperature", "0", "-o", "max_tokens", "6", "One, two, three,")
    assert "four" in done.stdout, done.stderr


def test_several_requests_at_once(llm: Llm) -> None:
    options = ["-m", "chat", "-o", "temperature", "0", "-o", "max_tokens", "8"]
    assert llm(*options, QUESTION).returncode == 0  # makes the database that the others write to
    answers = at_once(lambda city: llm(*options, f"Where is {city}?").stdout, list(CITIES))
    assert all(len(answer) > 3 for answer in answers)


def test_a_wrong_key_is_reported_as_wrong(llm: Llm) -> None:
    refused = llm("-m", "chat", QUESTION, key="wrong")
    assert refused.returncode == 1
    assert "401" in refused.stderr
