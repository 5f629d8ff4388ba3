#!/usr/bin/env python3
"""Measures the time to first token of interactive requests on an idle server and beside a backlog, alternately.

The backlog has priority 100 (--priority) and keeps twice as many requests in the server as it has sequences, with
prompts of 30 to 160 tokens and up to 128 new ones. Prompts of three lengths arrive at random times; none share a
prefix.

    .venv/bin/python scripts/bench_background.py [-m model.gguf] [--turns 5] [--priority 100] [--serve="-c 16384"]
"""

from __future__ import annotations

import asyncio
import itertools
from random import Random
from time import perf_counter

import aiohttp
from measuring import Comparison, Figures, cell, markdown_table, ratio_cell, script_arguments
from server_process import running_server, serve_command

from cppbatch.bench.prompts import random_text
from cppbatch.models.pull import choose_model

N_PARALLEL, LENGTHS = 16, (20, 100, 400)
IDLE, BUSY = "idle", "with the backlog"
SETTLE_S, OBSERVED_S = 8.0, 2.5
NUMBERS = itertools.count(1000)


async def generate(session: aiohttp.ClientSession, rng: Random, n_prompt: int, n_new: int, priority: int) -> Figures:
    """Sends a prompt of its own. Returns milliseconds to the first token, and those in the queue."""
    prompt = f"{next(NUMBERS)}: {random_text(rng, n_prompt - 2)}"
    body = {"prompt": prompt, "max_tokens": n_new, "ignore_eos": True, "priority": priority}
    async with session.post("/generate", json=body) as response:
        response.raise_for_status()
        timings = (await response.json())["timings"]
    queue, first = timings["queue_seconds"], timings["time_to_first_token_seconds"]
    return {"ttft": 1000 * first, "queue": 1000 * queue}


async def backlog(session: aiohttp.ClientSession, rng: Random, priority: int) -> None:
    for shortest in itertools.chain([1], itertools.repeat(64)):  # the first ones do not end together
        await generate(session, rng, rng.randint(30, 160), rng.randint(shortest, 128), priority)


async def generated(session: aiohttp.ClientSession) -> tuple[float, int]:
    """Returns the time, and the tokens that the server has generated so far."""
    async with session.get("/stats") as response:
        return perf_counter(), (await response.json())["generated_tokens"]


def speed(before: tuple[float, int], after: tuple[float, int]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


async def measure(url: str, state: str, turn: int, priority: int) -> dict[str, float | None]:
    rng, found = Random(turn), dict[str, float | None]()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = []
        if state == BUSY:
            tasks = [asyncio.create_task(backlog(session, Random(i), priority)) for i in range(2 * N_PARALLEL)]
            await asyncio.sleep(SETTLE_S)
            before = await generated(session)
            await asyncio.sleep(OBSERVED_S)
            found["alone"] = speed(before, await generated(session))
        before = await generated(session)
        for n in LENGTHS:
            await asyncio.sleep(rng.uniform(0.4, 0.8))
            found |= {f"{key}_{n}": value for key, value in (await generate(session, rng, n, 4, 0)).items()}
        found["beside"] = speed(before, await generated(session))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1)  # the server frees the sequences of its lost clients
    return found


def main() -> None:
    """Prints a row for each length of a prompt: medians, and the median of the turns' ratios."""
    parser = script_arguments(__doc__, turns=5)
    parser.add_argument("--priority", type=int, default=100, help="of the backlog (100)")
    parser.add_argument("--serve", default="-c 16384", help="more flags of `cppbatch serve` (-c 16384)")
    args = parser.parse_args()
    command = serve_command(choose_model(args.model), "-np", N_PARALLEL, *args.serve.split())
    with running_server(command) as server:
        found = Comparison([IDLE, BUSY]).measure(
            args.turns, lambda state, turn: asyncio.run(measure(server.url, state, turn, args.priority)), uncounted=1
        )
    rows = [
        [
            str(n), *(cell(found.median(state, f"ttft_{n}"), 0) for state in (IDLE, BUSY)),
            cell(found.median(BUSY, f"queue_{n}"), 0), ratio_cell(found.ratio(f"ttft_{n}", BUSY, IDLE)),
        ]
        for n in LENGTHS
    ]  # fmt: skip
    titles = ["prompt tokens", "TTFT on an idle engine, ms", "with the backlog, ms", "of that in the queue", "ratio"]
    print(markdown_table(titles, rows))
    alone, beside = (cell(found.median(BUSY, key), 1) for key in ("alone", "beside"))
    print(f"the backlog: {alone} tokens/s alone, {beside} beside the requests")


if __name__ == "__main__":
    main()
