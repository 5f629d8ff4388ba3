"""A real worker ends when the server has nothing to do, and the next request gets its answer from another one."""

from __future__ import annotations

import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.support.batch_files import client_of, counts, line, make_batch, results, wait_until
from tests.support.server_process import ServerProcess

PROMPT: dict[str, Any] = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0}


def complete(server: ServerProcess) -> str:
    return str(server.post("/v1/completions", PROMPT)["choices"][0]["text"])


def wait_for_sleep(server: ServerProcess) -> None:
    wait_until(lambda: is_asleep(server))


def memory(server: ServerProcess) -> int:
    process = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])


def metric(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[-1])


def is_asleep(server: ServerProcess) -> bool:
    return bool(server.get("/props")["is_sleeping"])


def n_sleeps(server: ServerProcess) -> int:
    return sum("stopping the worker" in each for each in server.errors)


def has_slept(server: ServerProcess, times: int) -> bool:
    return n_sleeps(server) == times


READING = (
    *("/health", "/ready", "/props", "/v1/models", "/models", "/slots", "/stats"),
    *("/metrics", "/live", "/", "/openapi.json"),
)
HELLO = [{"role": "user", "content": "Hello"}]
WAKING: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "Hello"},
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
    "/v1/messages/count_tokens": {"model": "any", "messages": HELLO},
}


def test_looking_at_a_sleeping_server_does_not_wake_it_and_counting_tokens_does(
    tiny_llama: Path, tmp_path: Path
) -> None:
    flags = ("-c", "2048", "--sleep-idle-seconds", "1", "-v", "--data-dir", tmp_path)
    with ServerProcess("-m", tiny_llama, *flags) as server:
        server.wait_ready()
        wait_for_sleep(server)
        for path in READING:
            with urllib.request.urlopen(server.url + path, timeout=30) as answer:
                assert answer.status == 200
                assert answer.read(1)
            assert is_asleep(server), path
        assert n_sleeps(server) == 1
        for n, (path, body) in enumerate(WAKING.items(), 2):
            assert server.post(path, body)
            wait_until(partial(has_slept, server, n))
        assert "killed" not in "".join(server.errors), "its worker ends by itself"


def test_a_batch_wakes_a_server_keeps_it_awake_and_continues_after_a_restart(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("-m", tiny_llama, "-c", "2048", "-np", "2", "--sleep-idle-seconds", "1", "--data-dir", tmp_path)
    work = b"\n".join(line(f"item-{i}", max_tokens=100, ignore_eos=True) for i in range(12))
    paced = "tests.support.paced_server"  # four seconds of work are left for the second server
    with ServerProcess(*flags, in_group=True, module=paced) as server:
        client = client_of(server.wait_ready())
        wait_for_sleep(server)
        batch = make_batch(client, work)
        wait_until(lambda: counts(client.batches.retrieve(batch.id)).completed > 4)
        server.kill_group()
    with ServerProcess(*flags, module=paced) as server:
        client = client_of(server.wait_ready())
        n_seen = 0
        while True:
            asleep, now = is_asleep(server), client.batches.retrieve(batch.id)
            if now.status not in ("validating", "in_progress", "finalizing"):
                break
            assert not asleep
            n_seen += 1
            time.sleep(0.2)
        assert n_seen > 2
        assert (now.status, len(results(client, now.output_file_id))) == ("completed", 12)
        wait_for_sleep(server)


def test_a_server_sleeps_and_wakes_for_a_request_with_the_same_answer(default_model: Path) -> None:
    with ServerProcess("-m", default_model, "-c", "2048", "--sleep-idle-seconds", "1") as server:
        server.wait_ready()
        said, awake = complete(server), memory(server)
        wait_for_sleep(server)
        wait_until(lambda: not server.workers)
        assert memory(server) < awake / 2
        assert server.get("/health")["status"] == "sleeping"
        assert server.get("/stats")["generated_tokens"] == 8
        assert server.get("/v1/models")["data"]
        assert metric(server, "llamacpp:tokens_predicted_total") == 8
        assert server.get("/props")["is_sleeping"], "no report wakes it"

        assert complete(server) == said
        with server.stream("/v1/completions", {**PROMPT, "max_tokens": 1000, "stream": True}) as answer:
            answer.readline()
            assert not is_asleep(server)
            assert server.get("/health") == {"status": "ok", "progress": 1.0}
        (worker,) = server.get("/stats")["workers"]
        assert worker["restarts"] == 0
        wait_for_sleep(server)


def test_a_prefix_on_disk_survives_the_sleep(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("-m", tiny_llama, "-c", "8192", "-np", "2", "--data-dir", tmp_path / "data")
    question = {"prompt": "All of this is read only once. " * 80 + "The end:", "max_tokens": 4, "temperature": 0}
    with ServerProcess(
        *flags, "--sleep-idle-seconds", "1", "--prefix-cache-disk", f"{tmp_path / 'prefixes'},1"
    ) as server:
        server.wait_ready()
        first = server.post("/v1/completions", question)["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        wait_for_sleep(server)
        again = server.post("/v1/completions", question)["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] > 0.9 * first["prompt_tokens"]
