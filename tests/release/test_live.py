"""`GET /live` of a real server: 16 rows that share their prompt, a worker that is killed meanwhile, and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec

from cppbatch.server.observe.live import LiveSnapshot, LiveWorker
from tests.support.server_process import ServerProcess
from tests.unit.test_live_types import check_cells

N, N_TOKENS = 16, 60
PROMPT = "You are a helpful assistant who answers every question at length, with examples, and in plain words. " * 4
LIMIT_S = 60


async def snapshots(session: aiohttp.ClientSession, url: str) -> AsyncIterator[LiveSnapshot]:
    async with session.get(f"{url}/live") as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: "):
                snapshot = msgspec.json.decode(line[6:], type=LiveSnapshot)
                for worker in snapshot.workers:
                    if worker.engine:
                        check_cells(worker.engine.cells)
                yield snapshot


async def first(stream: AsyncIterator[LiveSnapshot], condition: Callable[[LiveWorker], object]) -> LiveWorker:
    """The worker in the first snapshot for which this holds."""

    async def follow() -> LiveWorker:
        async for snapshot in stream:
            (worker,) = snapshot.workers
            if condition(worker):
                return worker
        raise AssertionError("the stream has ended")

    return await asyncio.wait_for(follow(), LIMIT_S)


def n_decoding(worker: LiveWorker) -> int:
    return sum(row.state == "decode" for row in worker.engine.rows) if worker.engine else 0


async def complete(session: aiohttp.ClientSession, url: str, i: int) -> int:
    body = {"prompt": f"{PROMPT}{i}", "max_tokens": N_TOKENS, "ignore_eos": True, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        n_tokens: int = (await answer.json())["usage"]["completion_tokens"]
        return n_tokens


async def watch(url: str) -> None:
    async with aiohttp.ClientSession(read_bufsize=1 << 20, timeout=aiohttp.ClientTimeout(total=300)) as session:
        stream = snapshots(session, url)
        idle = await first(stream, lambda worker: worker.engine)
        assert (idle.in_flight, idle.restarts) == (0, 0)
        running = [asyncio.create_task(complete(session, url, i)) for i in range(N)]
        busy = await first(stream, lambda worker: n_decoding(worker) == N)
        assert busy.engine is not None
        assert max(len(segment.sequences) for segment in busy.engine.cells.segments) == N
        assert busy.pid is not None
        os.kill(busy.pid, signal.SIGKILL)
        dead = await first(stream, lambda worker: worker.health.status == "restarting")
        assert (dead.engine, dead.age, dead.in_flight) == (None, None, N)
        back = await first(stream, lambda worker: n_decoding(worker) == N)
        assert back.pid not in (None, busy.pid)
        assert (back.restarts, back.health.status) == (1, "ok")
        assert await asyncio.gather(*running) == [N_TOKENS] * N
        rested = await first(stream, lambda worker: worker.in_flight == 0 and worker.interval is None)
        assert rested.engine is not None
        assert rested.engine.rows == []


def test_sixteen_rows_share_their_prompt_and_a_killed_worker_is_seen_to_come_back(tiny_llama: Path) -> None:
    sizes = ["-np", N, "-c", 8192, "-t", 1, "--kv-layout", "unified"]
    with ServerProcess("-m", tiny_llama, *map(str, sizes), module="tests.support.paced_server") as server:
        asyncio.run(watch(server.wait_ready().url))
        asyncio.run(end_with_an_open_page(server))


async def end_with_an_open_page(server: ServerProcess) -> None:
    """It does not wait for the page: --drain-timeout is 30 s."""
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as session, session.get(f"{server.url}/live") as page:
        await page.content.readuntil(b"\n")
        server.interrupt()
        assert await asyncio.to_thread(server.wait, 20) == 0
