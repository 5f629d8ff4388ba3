"""The promise on the real model, over HTTP: workers die and hang under 16 streams, and no client notices."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.support.batch_files import wait_until
from tests.support.fixtures import server_process
from tests.support.server_process import ServerProcess

N = 16
OPENINGS = ["Story", "A list of", "Dear", "The theorem"]
LONG = "".join(f"Chapter {i} is about the colour of the sea. " for i in range(4))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},  # llama.cpp's defaults
    {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"temperature": 1.2, "top_k": 0, "top_p": 0.9},
    {"temperature": 0.8, "typical_p": 0.9, "dry_multiplier": 0.8},
    {"temperature": 0.8, "response_format": {"type": "json_object", "schema": {"type": "array", "minItems": 30}}},
]

FLAGS = ("-np", str(N), "-c", "8192", "--step-timeout", "10", "-ctk", "f32", "-ctv", "f32")

server = server_process("f32_model", *FLAGS)


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> Callable[[int, int], list[str]]:
    """The texts of sixteen streams, by their length in tokens and the number of the first one."""
    return functools.cache(lambda n_tokens, first: asyncio.run(sixteen_streams(server.url, n_tokens, first)))


async def sixteen_streams(
    url: str, n_tokens: int, first: int = 0, disturb: Callable[[int], None] = lambda n_chunks: None
) -> list[str]:
    """Half greedy, half seeded; a quarter has long prompts, which are computed in other pieces with what follows them.
    `disturb` is called with the number of chunks that all of them have received so far."""
    n_chunks = 0

    async def one(session: aiohttp.ClientSession, i: int) -> str:
        nonlocal n_chunks
        prompt = f"{LONG * (i % 4 == 1)}{OPENINGS[i % 4]} number {i}:"
        body = {"prompt": prompt, "max_tokens": n_tokens, "stream": True, "seed": i, **KINDS[i % len(KINDS)]}
        text, finish_reason = "", None
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                assert "error" not in chunk, chunk
                (choice,) = chunk["choices"]
                text += choice["text"]
                finish_reason = choice["finish_reason"]
                n_chunks += 1
                disturb(n_chunks)
        assert finish_reason in ("length", "stop")
        return text

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3000)) as session:
        return list(await asyncio.gather(*(one(session, first + i) for i in range(N))))


SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("how", "times", "first"),
    [
        pytest.param(signal.SIGKILL, 3, 0, id="killed"),
        *(pytest.param(signal.SIGKILL, 3, N * i, id=f"killed, round {i}", marks=SOAK) for i in range(1, 19)),
        pytest.param(signal.SIGKILL, 100, 0, id="killed 100 times", marks=SOAK),
        pytest.param(signal.SIGSEGV, 20, 0, id="crashed 20 times", marks=SOAK),
        pytest.param(signal.SIGSTOP, 20, 0, id="stopped 20 times", marks=SOAK),  # each waits for --step-timeout
    ],
)
def test_sixteen_streams_end_with_the_text_they_would_have_had(
    server: ServerProcess, undisturbed: Callable[[int, int], list[str]], how: signal.Signals, times: int, first: int
) -> None:
    """With an F32 cache, and no other flag."""
    restarts = server.get("/stats")["workers"][0]["restarts"]
    n_tokens = 16 if times < 10 else 200
    chance = random.Random(f"{how} {first}")
    # 100 chunks for 20 deaths: some tokens for each; of short texts fewer, because a busy machine merges chunks
    apart = (6 if times < 10 else 10) * n_tokens // times
    moments = [apart * i + chance.randint(apart // 2, apart) for i in range(times)]
    wanted = undisturbed(n_tokens, first)

    hit: set[int] = set()

    def disturb(n_chunks: int) -> None:
        if moments and n_chunks >= moments[0]:
            pid = server.get("/stats")["workers"][0]["pid"]
            if pid and pid not in hit:  # chunks of a stopped worker may still be on the way
                os.kill(pid, how)
                hit.add(pid)
                moments.pop(0)

    assert asyncio.run(sixteen_streams(server.url, n_tokens, first, disturb)) == wanted
    assert not moments, "it was over before the last death"
    wait_until(lambda: server.get("/stats")["workers"][0]["health"]["status"] == "ok")
    state = server.get("/stats")["workers"][0]
    assert state["restarts"] - restarts >= times  # more on a slow machine, where a step may take --step-timeout
    server.wait_idle()
