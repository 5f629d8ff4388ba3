"""A real worker ends when the server has nothing to do, and the next request gets its answer from another one."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tests.server_process import ServerProcess

PROMPT: dict[str, Any] = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0}


def complete(server: ServerProcess) -> str:
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(PROMPT).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def wait_for_sleep(server: ServerProcess) -> None:
    end = time.monotonic() + 30
    while not server.get("/props")["is_sleeping"]:
        assert time.monotonic() < end, "it does not sleep"
        time.sleep(0.05)


def memory(server: ServerProcess) -> int:
    process = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])


def metric(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[-1])


def test_a_server_sleeps_wakes_for_a_request_and_says_the_same(default_model: Path) -> None:
    with ServerProcess("-m", default_model, "-c", "2048", "--sleep-idle-seconds", "1") as server:
        server.wait_ready()
        said, awake = complete(server), memory(server)
        wait_for_sleep(server)
        end = time.monotonic() + 10
        while psutil.Process(server.process.pid).children():
            assert time.monotonic() < end, "the worker lives on"
            time.sleep(0.05)
        assert memory(server) < awake / 2
        assert server.get("/health")["status"] == "sleeping"
        assert server.get("/stats")["generated_tokens"] == 8
        assert server.get("/v1/models")["data"]
        assert metric(server, "llamacpp:tokens_predicted_total") == 8
        assert server.get("/props")["is_sleeping"], "no report wakes it"

        assert complete(server) == said
        assert not server.get("/props")["is_sleeping"]
        assert server.get("/health") == {"status": "ok", "progress": 1.0}
        (worker,) = server.get("/stats")["workers"]
        assert worker["restarts"] == 0
        wait_for_sleep(server)
