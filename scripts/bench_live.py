#!/usr/bin/env python3
"""What `GET /live` costs: tokens/s with and without open pages, and the time of a snapshot.

16 clients keep the server busy. Its speed is measured in short turns, with no page and with 20, because the speed of a
shared machine changes from minute to minute.

    .venv/bin/python scripts/bench_live.py [-m model.gguf] [--pages 20] [--turns 12] [--seconds 5]
    .venv/bin/python scripts/bench_live.py --snapshot [-m model.gguf] [-n 16,64,256]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
import msgspec
import psutil

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.prompts import random_text
from cppbatch.bench.report import markdown_table
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.models.pull import choose_model
from cppbatch.sizing.child_process import running_server

N_PARALLEL, N_PROMPT, N_NEW = 16, 48, (64, 192)
SETTLE_S, WARM_UP_S = 0.5, 4.0
REPEATS = 200


async def keep_busy(session: aiohttp.ClientSession, url: str, rng: Random) -> None:
    """One client: a text after the other, of different lengths."""
    while True:
        n = rng.randint(*N_NEW)
        body = {"prompt": random_text(rng, N_PROMPT), "max_tokens": n, "ignore_eos": True, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass


async def open_page(session: aiohttp.ClientSession, url: str, sizes: list[int]) -> None:
    """Reads `/live`, and notes the size of each event."""
    async with session.get(f"{url}/live") as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: "):
                sizes.append(len(line))


class Figures(NamedTuple):
    """Of one measurement."""

    tokens_per_second: float
    front_cpu: float
    """CPU time of the server's process, which sends the snapshots, as a share of a core."""


async def figures_of(session: aiohttp.ClientSession, url: str, front: psutil.Process, seconds: float) -> Figures:
    async def now() -> tuple[float, int, float]:
        async with session.get(f"{url}/stats") as response:
            n: int = (await response.json())["generated_tokens"]
        return perf_counter(), n, sum(front.cpu_times()[:2])

    await asyncio.sleep(SETTLE_S)
    began, n_before, cpu_before = await now()
    await asyncio.sleep(seconds)
    ended, n_after, cpu_after = await now()
    took = ended - began
    return Figures((n_after - n_before) / took, (cpu_after - cpu_before) / took)


async def measure(url: str, front: psutil.Process, args: argparse.Namespace) -> None:
    ratios: list[float] = []
    measured: dict[int, list[Figures]] = {0: [], args.pages: []}
    sizes: list[int] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 22) as session:
        clients = [asyncio.create_task(keep_busy(session, url, Random(i))) for i in range(N_PARALLEL)]
        await asyncio.sleep(WARM_UP_S)
        for turn in range(args.turns):
            for n in (0, args.pages)[:: -1 if turn % 2 else 1]:
                pages = [asyncio.create_task(open_page(session, url, sizes)) for _ in range(n)]
                measured[n].append(await figures_of(session, url, front, args.seconds))
                await end(pages)
            without, beside = (measured[n][-1].tokens_per_second for n in (0, args.pages))
            ratios.append(beside / without)
            print(f"turn {turn + 1}: {without:.1f}, {beside:.1f} tokens/s", file=sys.stderr, flush=True)
        await end(clients)
    rows = []
    for n, ratio in ((0, 1.0), (args.pages, median(ratios))):
        speed = median(each.tokens_per_second for each in measured[n])
        cpu = median(each.front_cpu for each in measured[n])
        rows.append([str(n), f"{speed:.1f}", f"{ratio:.3f}", f"{100 * cpu:.1f}%"])
    header = ["open pages", "tokens/s", "ratio, median of the turns", "server process, of a core"]
    print(markdown_table(header, rows))
    per_page = len(sizes) / args.pages / args.turns / (args.seconds + SETTLE_S)
    print(f"{per_page:.1f} events a second for each page, of {median(sizes) / 1000:.1f} KB")


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()  # raises: it should have continued
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def time_snapshots(args: argparse.Namespace) -> None:
    """Microseconds of `BatchInferenceEngine.live`, of the worker's message, and of the server's event."""
    shared, rows = random_text(Random(0), N_PROMPT), []
    for n in map(int, args.n.split(",")):
        settings: dict[str, Any] = {"n_parallel": n, "n_ctx": 160 * n, "kv_layout": "unified", "spec": "off"}
        with BatchInferenceEngine(choose_model(args.model), **settings) as engine:
            for i in range(n + 8):
                engine.add_request(f"{shared} {i}", SamplingParams(max_tokens=64, ignore_eos=True))
            running = engine.core.scheduler.running
            while not all(sequence.n_generated for sequence in running) or len(running) < n:
                engine.step()
            live = engine.live()
            sent = msgspec.msgpack.encode(live)
            figures = [
                microseconds(engine.live),
                microseconds(partial(msgspec.msgpack.encode, live)),
                microseconds(partial(msgspec.msgpack.decode, sent, type=LiveEngine)),
                microseconds(partial(msgspec.json.encode, live)),
            ]
            kb = len(msgspec.json.encode(live)) / 1000
            rows.append([str(n), str(len(live.cells.segments)), *(f"{us:.0f}" for us in figures), f"{kb:.1f}"])
    print(markdown_table(["sequences", "segments", "live, us", "encode, us", "decode, us", "JSON, us", "KB"], rows))


def microseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return 1e6 * median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--turns", type=int, default=12, help="of two measurements each (12)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement (5)")
    parser.add_argument("--snapshot", action="store_true", help="time snapshots instead")
    parser.add_argument("-n", default="16,64,256", help="sequences of the snapshots (16,64,256)")
    args = parser.parse_args()
    if args.snapshot:
        time_snapshots(args)
        return
    command = [sys.executable, "-m", "cppbatch", "serve", "-m", str(choose_model(args.model)), "-np", str(N_PARALLEL)]
    with running_server([*command, "-c", "8192", "--spec", "off"]) as running:
        asyncio.run(measure(running.url, psutil.Process(running.process.pid), args))


if __name__ == "__main__":
    main()
