#!/usr/bin/env python3
"""Cost of the process boundary: 16 streams over HTTP, with the engine in a worker process and with --in-process.

Starts `cppbatch serve` in both modes in turn and prints the tokens/s of each run and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import time

import aiohttp

MODES = {"worker process": [], "in process": ["--in-process"]}


async def streams(url: str, n: int, n_tokens: int) -> float:
    """Returns the tokens/s of `n` concurrent streams, from the first chunk of any stream to the end."""
    body = {"max_tokens": n_tokens, "ignore_eos": True, "stream": True, "temperature": 0.8}
    first, total = 0.0, 0

    async def one(session: aiohttp.ClientSession, i: int) -> None:
        nonlocal first, total
        async with session.post(f"{url}/v1/completions", json={**body, "prompt": f"Fact number {i}:"}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
                    total += 1

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session, i) for i in range(n)))
    return total / (time.perf_counter() - first)


def measure(arguments: list[str], n: int, n_tokens: int) -> float:
    """Returns the tokens/s of a server with these arguments, after a warm-up."""
    command = [sys.executable, "-m", "cppbatch", "serve", "--port", "0", "-np", str(n), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        url = next(found[1] for line in server.stdout if (found := re.search(r"ready at (http://\S+)", line)))
        asyncio.run(streams(url, n, 16))
        speed = asyncio.run(streams(url, n, n_tokens))
        server.terminate()
        server.stdout.read()
    return speed


def main() -> None:
    """Prints each run and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=16, help="streams at once")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for i in range(options.repeats):
        for mode, flags in list(MODES.items())[:: 1 if i % 2 else -1]:
            speeds[mode].append(measure([*flags, *options.rest], options.n, options.tokens))
            print(f"{mode:<15} {speeds[mode][-1]:7.1f} tokens/s", flush=True)
    in_process, worker = (statistics.median(speeds[mode]) for mode in ("in process", "worker process"))
    print(f"medians: worker process {worker:.1f}, in process {in_process:.1f}: {worker / in_process:.1%}")


if __name__ == "__main__":
    main()
