"""Tokens/s of 16 clients over Ollama's `/api/chat`, beside the same over `/v1/chat/completions`, at a running server.

Usage: .venv/bin/python scripts/bench_ollama_api.py [--url http://127.0.0.1:8080] [--rounds 5] [--pid PID]

The APIs take turns. Each client streams an answer of 32 tokens, to a question of its own. Prints both medians and their
ratio. With the server's process id, also the CPU seconds of the process that speaks HTTP for 1,000 tokens, which say
more on a machine that other programs use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import psutil

Json = dict[str, Any]

CLIENTS, REQUESTS, TOKENS = 16, 1, 32


def ollama(messages: list[Json]) -> tuple[str, Json]:
    return "/api/chat", {"model": "", "messages": messages, "options": {"num_predict": TOKENS, "ignore_eos": True}}


def openai(messages: list[Json]) -> tuple[str, Json]:
    options = {"include_usage": True}
    body = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": options}
    return "/v1/chat/completions", body


def tokens_in(line: bytes) -> int:
    """The completion's tokens, which one line of a stream has."""
    data = line.removeprefix(b"data: ").strip()
    if not data.startswith(b"{"):
        return 0
    chunk = json.loads(data)
    usage = chunk.get("usage") or {}
    return int(chunk.get("eval_count") or usage.get("completion_tokens") or 0)


async def round_of(session: aiohttp.ClientSession, request_of: Callable[[list[Json]], tuple[str, Json]]) -> float:
    """Tokens/s over all clients."""

    async def client(number: int) -> int:
        n = 0
        for i in range(REQUESTS):
            path, body = request_of([{"role": "user", "content": f"Tell me {i + 2} facts about the number {number}."}])
            async with session.post(path, json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    n += tokens_in(line)
        return n

    began = time.perf_counter()
    counts = await asyncio.gather(*map(client, range(CLIENTS)))
    assert sum(counts) == CLIENTS * REQUESTS * TOKENS, counts
    return sum(counts) / (time.perf_counter() - began)


def _cpu_seconds(process: psutil.Process | None) -> float:
    """Of the process that speaks HTTP; the worker, which computes, is another one."""
    return sum(process.cpu_times()[:2]) if process else 0.0


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pid", type=int, default=None)
    given = parser.parse_args()
    process = psutil.Process(given.pid) if given.pid else None
    cpu = dict.fromkeys(("/api/chat", "/v1/chat/completions"), 0.0)
    apis = {"/api/chat": ollama, "/v1/chat/completions": openai}
    speeds: dict[str, list[float]] = {name: [] for name in apis}
    async with aiohttp.ClientSession(given.url, timeout=aiohttp.ClientTimeout(600)) as session:
        for request_of in apis.values():
            await round_of(session, request_of)  # warms up
        for i in range(given.rounds):
            for name in sorted(apis, reverse=bool(i % 2)):
                before = _cpu_seconds(process)
                speeds[name].append(await round_of(session, apis[name]))
                cpu[name] += _cpu_seconds(process) - before
    for name, each in speeds.items():
        print(f"{name}: {statistics.median(each):.1f} tokens/s ({', '.join(f'{one:.1f}' for one in each)})")
    n_tokens = given.rounds * CLIENTS * REQUESTS * TOKENS
    if process:
        print(
            *(f"{name}: {seconds * 1000 / n_tokens:.2f} CPU s per 1,000 tokens" for name, seconds in cpu.items()),
            sep="\n",
        )
    pairs = zip(*speeds.values(), strict=True)
    print(f"ratio, median of the pairs: {statistics.median(one / other for one, other in pairs):.3f}")


if __name__ == "__main__":
    asyncio.run(main())
