"""Clients that cost a server much: its memory stays bounded, and a normal request is answered within two seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.batch_files import wait_until
from tests.support.fixtures import server_process
from tests.support.server_process import ServerProcess

MIB = 1 << 20
NORMAL: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module", autouse=True)
def many_files() -> Iterator[None]:
    """The clients' sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FLAGS = ("-np", "16", "-c", "8192", "-t", "1")
server = server_process("tiny_llama", *FLAGS)


def memory(server: ServerProcess) -> dict[str, float]:
    """MiB of the server's process and of its worker."""
    (worker,) = server.workers
    processes = {"server": psutil.Process(server.process.pid), "worker": worker}
    return {name: process.memory_info().rss / MIB for name, process in processes.items()}


@contextlib.asynccontextmanager
async def watched(server: ServerProcess, name: str, most: float) -> AsyncIterator[None]:
    """Prints the largest memory meanwhile, and fails when it grows by more than `most` MiB."""
    before = peak = memory(server)

    async def watch() -> None:
        nonlocal peak
        while True:
            now = memory(server)
            peak = {name: max(peak[name], now[name]) for name in now}
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        shown = ", ".join(f"{part} {before[part]:.0f} -> {peak[part]:.0f} MiB" for part in before)
        print(f"\n{name}: {shown}")
    grown = sum(peak[part] - before[part] for part in before)
    assert grown < most, f"it grew by {grown:.0f} MiB"
    assert server.process.poll() is None


CLIENT = """
import sys, time, urllib.error, urllib.request
url, body, times = sys.argv[1:]
for _ in range(int(times)):
    began = time.monotonic()
    for _ in range(100):
        try:
            urllib.request.urlopen(urllib.request.Request(url, body.encode()), timeout=60).read()
            print(time.monotonic() - began)
            break
        except urllib.error.HTTPError as refused:
            assert refused.code == 429, refused.read()  # the queue is full just now
            time.sleep(0.05)
"""


@pytest.fixture(params=[60, pytest.param(2, marks=pytest.mark.soak)])
def within(request: pytest.FixtureRequest) -> float:
    """Seconds in which a normal request is answered. The promise is 2, on a machine with nothing else to do."""
    seconds: float = request.param
    return seconds


async def a_normal_request_is_answered(server: ServerProcess, within: float, **more: Any) -> None:
    """Three times, to a client in a separate process: this one is busy with its many connections. A 429 is retried."""
    body = json.dumps({**NORMAL, **more})
    command = [sys.executable, "-c", CLIENT, f"{server.url}/v1/completions", body, "3"]
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    seconds = [float(line) for line in (await client.communicate())[0].splitlines()]
    print(f"\nnormal requests took {', '.join(f'{each:.2f}' for each in seconds)} s", end="")
    assert len(seconds) == 3
    assert max(seconds) < within


def address(server: ServerProcess) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.parametrize("n", [500, pytest.param(2000, marks=pytest.mark.soak)])
async def test_connections_that_send_nothing(server: ServerProcess, within: float, n: int) -> None:
    async with watched(server, f"{n:,} silent connections", most=n / 10):
        connections = [await asyncio.open_connection(*address(server)) for _ in range(n)]
        await a_normal_request_is_answered(server, within)
        for _, writer in connections:
            writer.close()


@pytest.mark.parametrize("n", [40, pytest.param(200, marks=pytest.mark.soak)])
async def test_readers_that_do_not_read(server: ServerProcess, within: float, n: int) -> None:
    body = json.dumps({"prompt": "Go on", "max_tokens": 200, "stream": True, "ignore_eos": True, "logprobs": 5})
    request = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    async with watched(server, f"{n} readers that do not read", most=100 + n):
        connections = [await asyncio.open_connection(*address(server), limit=1) for _ in range(n)]
        for _, writer in connections:
            writer.write(request)
        await asyncio.to_thread(wait_until, lambda: server.get("/stats")["running"] == 16)
        await a_normal_request_is_answered(server, within, priority=-100)
        await asyncio.to_thread(server.wait_idle, 60)  # the engine does not wait for clients
        await a_normal_request_is_answered(server, within)
        for _, writer in connections:
            writer.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_clients_that_are_killed_leave_nothing_running(server: ServerProcess, stream: bool) -> None:
    body = json.dumps({"prompt": "Go on", "max_tokens": 450, "ignore_eos": True, "stream": stream, "n": 16})
    for _ in range(3):
        n_before = server.wait_idle()["generated_tokens"]
        client = subprocess.Popen([sys.executable, "-c", CLIENT, f"{server.url}/v1/completions", body, "1"])
        while not server.get("/stats")["workers"][0]["in_flight"]:
            assert client.poll() is None
        client.kill()
        client.wait()
        stats = server.wait_idle(30)
        assert stats["kv_cells_used"] == 0
        assert stats["generated_tokens"] - n_before < 16 * 450, "the answers were generated to their end"


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_body_of_1_gb(server: ServerProcess, within: float, declared: bool) -> None:
    chunk = b"x" * MIB
    head = "Content-Length: 1073741824" if declared else "Transfer-Encoding: chunked"
    async with watched(server, f"a body of 1 GB, {'declared' if declared else 'chunked'}", most=100):
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode())
        n_sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(1024):
                writer.write(chunk if declared else b"%x\r\n%s\r\n" % (len(chunk), chunk))
                await writer.drain()
                n_sent += 1
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(1000), 10)
            assert answer.startswith(b"HTTP/1.1 413")
        print(f"\n{n_sent} MiB left the client", end="")
        await a_normal_request_is_answered(server, within)
        writer.close()


async def test_bodies_in_chunks_of_one_byte(server: ServerProcess, within: float) -> None:
    """Each is refused after some thousand chunks, and parsed alternately with other requests until then."""

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection(*address(server))
        answering = asyncio.create_task(reader.readline())
        with contextlib.suppress(ConnectionError):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            while not answering.done():
                writer.write(b"1\r\nx\r\n" * 1000)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        return await answering

    async with watched(server, "20 bodies in chunks of one byte", most=100):
        attack = asyncio.gather(*(one() for _ in range(20)))
        await a_normal_request_is_answered(server, within)
        assert set(await attack) == {b"HTTP/1.1 400 Bad Request\r\n"}


@pytest.mark.parametrize(("n", "max_queue"), [(600, 400), pytest.param(10_000, 4_096, marks=pytest.mark.soak)])
async def test_more_requests_than_the_queue_holds(tiny_llama: Path, within: float, n: int, max_queue: int) -> None:
    with ServerProcess("-m", tiny_llama, *FLAGS, "--max-queue", str(max_queue)) as server:
        await queue_is_full(server.wait_ready(), within, n, max_queue)


async def queue_is_full(server: ServerProcess, within: float, n: int, max_queue: int) -> None:
    """Requests beyond the queue get Retry-After; a request with priority does not wait for the others."""
    statuses: Counter[int] = Counter()
    body = {"prompt": "Hello", "max_tokens": 150, "ignore_eos": True}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one() -> None:
            try:
                async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                    await answer.read()
                    statuses[answer.status] += 1
                    if answer.status == 429:
                        assert int(answer.headers["Retry-After"]) >= 1
            except aiohttp.ClientConnectionError:  # one of more connections than there may be
                statuses[0] += 1

        async with watched(server, f"{n:,} requests at once", most=700):
            running = [asyncio.create_task(one()) for _ in range(n)]
            n_queued = 0
            while n_queued + statuses.total() < n:
                await asyncio.sleep(0.5)
                n_queued = (await asyncio.to_thread(server.get, "/stats"))["workers"][0]["in_flight"]
            await a_normal_request_is_answered(server, within, priority=-100)
            print(f"\n{n_queued} queued; answers: {dict(statuses)} (0: not connected)", end="")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert n_queued > 0.7 * max_queue
    assert set(statuses) <= {200, 429, 0}
    stats = await asyncio.to_thread(server.wait_idle, 60)
    assert stats["kv_cells_used"] == 0
