#!/usr/bin/env python3
"""Effect of hostile clients on others: latencies of 8 streams and of /health, alone and beside each kind of attack.

Each attack runs in its own process at the lowest CPU priority, so that on a small machine its own work does not count
as the server's. Before each attack the same streams run alone for the same time.

.venv/bin/python scripts/bench_attacks.py [-m model.gguf] [--seconds 15] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil

from cppbatch.bench.load.completion_stream import CompletionStream, RequestFailure
from cppbatch.models.pull import choose_model
from cppbatch.sizing.child_process import RunningServer, running_server

COLUMNS = (
    "attack", "times", "inter-token p95", "ratio", "failed", "/health p99",
    "in flight", "cells", "seq_ids", "restarts", "MiB", "files",
)  # fmt: skip
STREAMS, NEW_TOKENS = 8, 128
HEALTH_EVERY_S = 0.02
MIB = 1 << 20

Attack = Callable[[aiohttp.ClientSession, str], Awaitable[object]]


# --- the attacks: each is repeated until the time is used up ------------------------------------------------------


async def post(session: aiohttp.ClientSession, url: str, body: bytes, kind: str = "application/json") -> int:
    async with session.post(url, data=body, headers={"Content-Type": kind}) as answer:
        await answer.read()
        return answer.status


def encoded(**body: Any) -> bytes:
    return json.dumps(body).encode()


@functools.cache
def special_bodies() -> tuple[bytes, bytes]:
    prompt = encoded(prompt="<|im_start|>x" * 300_000, max_tokens=1)
    return prompt, encoded(messages=[{"role": "user", "content": "x"}] * 40_000, max_tokens=1)


@functools.cache
def large_bodies() -> tuple[tuple[str, bytes], ...]:
    user = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    message = [{"role": "user", "content": "a"}]
    deep = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"tools":[{"type":"function","function":'
    deep += b'{"name":"f","parameters":' + b'{"a":' * 960 + b"1" + b"}" * 960 + b"}}]}"
    return (
        ("/v1/completions", encoded(prompt="a", logit_bias={str(i): 1 for i in range(1_000_000)}, max_tokens=1)),
        ("/v1/chat/completions", encoded(messages=[user] * 350_000, max_tokens=1)),
        ("/v1/chat/completions", encoded(messages=message, tools=[tool] * 180_000, max_tokens=1)),
        ("/v1/completions", encoded(prompt=[12] * 3_200_000, max_tokens=1)),
        ("/v1/completions", encoded(prompt="a", unknown=[[0]] * 2_000_000, max_tokens=1)),
        ("/v1/chat/completions", deep),
    )


NEXT_LARGE = itertools.cycle(range(6))


async def ids_out_of_range(session: aiohttp.ClientSession, url: str) -> None:
    huge = 2**64
    await post(session, f"{url}/v1/completions", encoded(prompt=[huge]))
    await post(session, f"{url}/generate", encoded(prompt="a", stop_token_ids=[huge], max_tokens=1))
    await post(session, f"{url}/detokenize", encoded(tokens=[huge]))
    await post(session, f"{url}/v1/embeddings", encoded(input=[huge]))


async def special_tokens(session: aiohttp.ClientSession, url: str) -> None:
    """Sends two prompts of megabytes of control tokens at once. The clients disconnect after 2 s."""
    prompt, chat = special_bodies()
    sends = [post(session, f"{url}/v1/completions", prompt), post(session, f"{url}/v1/chat/completions", chat)]
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), 2)


async def endless_forms(session: aiohttp.ClientSession, url: str) -> None:
    """Sends a form of 10,000 empty parts, then one that continues for a second."""
    part = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n"
    kind = "multipart/form-data; boundary=x"
    await post(session, f"{url}/v1/files", part * 10_000, kind)

    async def endless() -> AsyncIterator[bytes]:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            yield part * 100
            await asyncio.sleep(0)

    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(f"{url}/v1/files", data=endless(), headers={"Content-Type": kind}) as answer:
            await answer.read()


async def large_json(session: aiohttp.ClientSession, url: str) -> None:
    """Sends one of several bodies, in turn: 13 MB full of small values, or deeply nested."""
    path, body = large_bodies()[next(NEXT_LARGE)]
    await post(session, url + path, body)


async def slow_bodies(session: aiohttp.ClientSession, url: str) -> None:
    """Sends 200 requests with bodies of one byte per second."""

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(600):
            yield b" "
            await asyncio.sleep(1)

    async def one() -> None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"{url}/v1/completions", data=slow()) as answer:
                await answer.read()

    await asyncio.gather(*(one() for _ in range(200)))


async def idle_connections(session: aiohttp.ClientSession, url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    connections = []
    for _ in range(20):
        connections += await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(50)))
        await asyncio.sleep(0.2)
    for _, writer in connections:
        writer.close()


async def huge_schemas(session: aiohttp.ClientSession, url: str) -> None:
    """Sends schemas that are wide, that explode, and that are large."""
    wide = {"type": "object", "properties": {f"p{i}": {"enum": [f"v{j}" for j in range(20)]} for i in range(500)}}
    explosive = {"type": "array", "items": {"type": "integer", "multipleOf": 99999989}, "minItems": 100_000}
    pattern = {"type": "string", "pattern": "(a{1,500}b{1,500}){1,500}"}
    for schema in (wide, explosive, pattern):
        await post(session, f"{url}/generate", encoded(prompt="a", json_schema=schema, max_tokens=4))


async def cancelled_requests(session: aiohttp.ClientSession, url: str) -> None:
    """Sends 100 requests from clients that disconnect at once; over 10,000 in total."""
    host, port = url.removeprefix("http://").split(":")
    body = encoded(prompt="Hello, " * 50, max_tokens=100, stream=True)
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def one() -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.close()

    await asyncio.gather(*(one() for _ in range(100)))


async def without_end(url: str, start: bytes, repeated: bytes) -> None:
    """Sends a request without an end on 4 connections, until the server closes them."""
    host, port = url.removeprefix("http://").split(":")

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        reading = asyncio.create_task(reader.read())  # so that answers do not delay the server
        try:
            writer.write(start)
            while True:
                writer.write(repeated)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            reading.cancel()
            writer.close()

    await asyncio.gather(*(one() for _ in range(4)))


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def chunks_of_one_byte(session: aiohttp.ClientSession, url: str) -> None:
    await without_end(url, CHUNKED, b"1\r\nx\r\n" * 10_000)


async def chunks_of_24_bytes(session: aiohttp.ClientSession, url: str) -> None:
    """The smallest that are not refused."""
    await without_end(url, CHUNKED, (b"18\r\n" + b" " * 24 + b"\r\n") * 2_000)


async def chunk_extensions(session: aiohttp.ClientSession, url: str) -> None:
    await without_end(url, CHUNKED, b"1;name=value\r\nx\r\n" * 4_000)


async def chunks_nobody_reads(session: aiohttp.ClientSession, url: str) -> None:
    await without_end(url, CHUNKED.replace(b"POST /v1/completions", b"GET /health"), b"1\r\nx\r\n" * 10_000)


async def pipelined_requests(session: aiohttp.ClientSession, url: str) -> None:
    await without_end(url, b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        ids_out_of_range,
        special_tokens,
        endless_forms,
        large_json,
        slow_bodies,
        idle_connections,
        huge_schemas,
        cancelled_requests,
        chunks_of_one_byte,
        chunks_of_24_bytes,
        chunk_extensions,
        chunks_nobody_reads,
        pipelined_requests,
    )
}


async def run_attack(name: str, url: str, seconds: float) -> None:
    """Prints "ready", waits for a line on stdin, repeats the attack, and prints how often it completed."""
    special_bodies(), large_bodies()
    print("ready", flush=True)
    sys.stdin.readline()
    n, end = 0, time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError):
                await asyncio.wait_for(ATTACKS[name](session, url), max(0.1, end - time.monotonic()))
                n += 1
    print(n)


# --- the normal load -----------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Latencies of the streams and of /health in one phase, in seconds."""

    gaps: list[float]
    health: list[float]
    failures: list[str]


async def normal_load(url: str, until: Callable[[], bool]) -> Load:
    """Runs 8 streams of consecutive requests until `until` returns True. Started requests run to their end."""
    load = Load([], [], [])
    timeout = aiohttp.ClientTimeout(total=120)

    async def stream(session: aiohttp.ClientSession, i: int) -> None:
        n = 0
        while not until():
            n += 1
            prompt = f"Stream {i} tells story {n} of {os.getpid()}:"
            body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
            completion = CompletionStream()
            try:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    if answer.status != 200:
                        raise RequestFailure(f"status {answer.status}", (await answer.text())[:200])
                    async for data in answer.content.iter_any():
                        completion.feed(data, time.perf_counter())
                completion.finish(time.perf_counter())
            except (RequestFailure, aiohttp.ClientError, asyncio.TimeoutError) as error:
                load.failures.append(f"{type(error).__name__}: {error}")
            load.gaps.extend(completion.gaps)

    async def ask_health(session: aiohttp.ClientSession) -> None:
        began = time.perf_counter()
        async with session.get(f"{url}/health") as answer:
            await answer.read()
        load.health.append(time.perf_counter() - began)

    async def health(session: aiohttp.ClientSession) -> None:
        """Sends requests at fixed times, without waiting for answers. Otherwise one long wait would count once."""
        requests = []
        while not until():
            requests.append(asyncio.create_task(ask_health(session)))
            await asyncio.sleep(HEALTH_EVERY_S)
        await asyncio.gather(*requests, return_exceptions=True)

    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(health(session), *(stream(session, i) for i in range(STREAMS)))
    return load


# --- the server ----------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """Values that must be the same before and after an attack."""

    in_flight: int
    cells: int
    seq_ids_taken: int
    restarts: int
    mib: float
    files: int


def state_of(server: RunningServer) -> State:
    """Waits until no request is in flight, for 20 s at most. Returns the state."""
    end = time.monotonic() + 20
    while True:
        with urllib.request.urlopen(f"{server.url}/stats", timeout=120) as answer:
            stats = json.load(answer)
        in_flight = sum(worker["in_flight"] for worker in stats["workers"])
        if not in_flight or time.monotonic() > end:
            break
        time.sleep(0.2)
    process = psutil.Process(server.process.pid)
    processes = [process, *process.children(recursive=True)]
    return State(
        in_flight,
        stats["kv_cells_used"],
        stats["seq_ids"] - stats["seq_ids_free"] - stats["prefixes_in_cells"],
        sum(worker["restarts"] for worker in stats["workers"]),
        sum(each.memory_info().rss for each in processes) / MIB,
        sum(each.num_fds() for each in processes),
    )


def phase(url: str, seconds: float, attack: str | None) -> tuple[Load, str]:
    """Runs the normal load beside the attack. Returns the latencies and how often the attack completed."""
    attacker = None
    if attack:
        command = ["nice", "-n", "19", sys.executable, __file__, "--attack", attack, "--url", url]
        command += ["--seconds", str(seconds)]
        attacker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert attacker.stdin
        assert attacker.stdout
        attacker.stdout.readline()
        attacker.stdin.write("go\n")
        attacker.stdin.flush()
    end = time.monotonic() + seconds

    def is_over() -> bool:
        return time.monotonic() > end and (attacker is None or attacker.poll() is not None)

    load = asyncio.run(normal_load(url, is_over))
    return load, attacker.communicate()[0].strip() if attacker else ""


def percentile(values: list[float], q: float) -> float:
    return 1000 * float(np.percentile(values, q)) if values else float("nan")


def main() -> None:
    """Prints a row for each attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--only", nargs="*", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        asyncio.run(run_attack(args.attack, args.url, args.seconds))
        return
    model = str(choose_model(args.model))
    command = [sys.executable, "-m", "cppbatch", "serve", "-m", model, "-np", "16", "-c", "16384"]
    with running_server(command) as server:
        phase(server.url, 5, None)  # warm-up
        print("inter-token p95 and /health p99 in ms, alone > attacked; state before > after\n")
        print("| " + " | ".join(COLUMNS) + " |")
        print("|---" * len(COLUMNS) + "|")
        for name in args.only:
            quiet, _ = phase(server.url, args.seconds, None)
            before = state_of(server)
            attacked, times = phase(server.url, args.seconds, name)
            after = state_of(server)
            p95 = percentile(quiet.gaps, 95), percentile(attacked.gaps, 95)
            health = percentile(quiet.health, 99), percentile(attacked.health, 99)
            states = " | ".join(f"{a:.0f} > {b:.0f}" for a, b in zip(before, after, strict=True))
            gaps = f"{p95[0]:.0f} > {p95[1]:.0f} | {p95[1] / p95[0]:.2f} | {len(attacked.failures)}"
            print(f"| {name} | {times} | {gaps} | {health[0]:.0f} > {health[1]:.0f} | {states} |", flush=True)
            for failure in sorted(set(attacked.failures))[:3]:
                print(f"  {failure}", file=sys.stderr)


if __name__ == "__main__":
    main()
