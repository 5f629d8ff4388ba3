#!/usr/bin/env python3
"""Time to first token (TTFT) of interactive requests, on an idle engine and while background work of priority 100 runs.

In each repeat a backlog is started, requests with prompts of three lengths arrive one after the other at random times,
the backlog is cancelled, and the same kind of requests arrive at the idle engine. No two prompts share a prefix.

.venv/bin/python scripts/bench_background.py [-m model.gguf] [--kv-layout unified] [--repeats 5] [--priority 100]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from statistics import mean, median
from time import perf_counter

from cppbatch import GenerationRequest, LocalEngine, SamplingParams
from cppbatch.bench.prompts import random_text
from cppbatch.models.pull import choose_model

N_PARALLEL, LENGTHS = 16, (20, 100, 400)
BACKGROUND_PROMPT, BACKGROUND_NEW = (30, 160), (64, 128)  # ranges in tokens
SETTLE_S, ALONE_S, PAUSE_S = 8.0, 2.5, (0.4, 0.8)


class Background:
    """Keeps twice `N_PARALLEL` requests in the engine until it is cancelled."""

    def __init__(self, engine: LocalEngine, rng: Random, priority: int, numbers: Iterator[int]) -> None:
        self._engine, self._rng, self._priority, self._numbers = engine, rng, priority, numbers
        self.n_tokens = 0
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(2 * N_PARALLEL)]

    async def _go_on(self) -> None:
        min_tokens = 1  # short first outputs, so that the requests do not end together
        while True:
            n = next(self._numbers)
            prompt = f"{n}. {random_text(self._rng, self._rng.randint(*BACKGROUND_PROMPT))}"
            params = SamplingParams(max_tokens=self._rng.randint(min_tokens, BACKGROUND_NEW[1]), ignore_eos=True)
            min_tokens = BACKGROUND_NEW[0]
            request = GenerationRequest(id=f"b{n}", prompt=prompt, params=params, priority=self._priority)
            async for event in self._engine.submit(request):
                self.n_tokens += len(event.tokens)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def ask(engine: LocalEngine, rng: Random, n_prompt: int, n: int) -> tuple[float, float]:
    """Sends a request of a few tokens. Returns its TTFT and its time in the queue, in seconds."""
    prompt = f"{n}: {random_text(rng, n_prompt - 2)}"
    request = GenerationRequest(id=f"i{n}", prompt=prompt, params=SamplingParams(max_tokens=4, ignore_eos=True))
    began, first = perf_counter(), 0.0
    async for event in engine.submit(request):
        first = first or (perf_counter() - began if event.tokens else 0.0)
        waited = event.usage.queue_seconds if event.usage else 0.0
    return first, waited


async def observe(engine: LocalEngine, background: Background, speeds: list[float], steps: list[float]) -> None:
    """Records the tokens/s and the mean step seconds of background work that runs alone."""
    before, n_before, began = await engine.stats(), background.n_tokens, perf_counter()
    await asyncio.sleep(ALONE_S)
    took = perf_counter() - began
    speeds.append((background.n_tokens - n_before) / took)
    steps.append(took / ((await engine.stats()).steps - before.steps))


async def run(args: argparse.Namespace) -> None:
    rng, numbers = Random(1), itertools.count(1000)
    ttfts: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    alone: list[float] = []
    beside: list[float] = []
    steps: list[float] = []
    settings = {"n_ctx": args.n_ctx, "kv_layout": args.kv_layout}
    async with LocalEngine(choose_model(args.model), n_parallel=N_PARALLEL, **settings) as engine:
        for n_prompt in LENGTHS:
            await ask(engine, rng, n_prompt, next(numbers))  # warm-up
        for _ in range(args.repeats):
            background = Background(engine, rng, args.priority, numbers)
            await asyncio.sleep(SETTLE_S)
            assert (await engine.stats()).waiting, "the backlog does not fill the engine"
            await observe(engine, background, alone, steps)
            n_before, began = background.n_tokens, perf_counter()
            for n_prompt in LENGTHS:
                await asyncio.sleep(rng.uniform(*PAUSE_S))
                ttfts["busy", n_prompt].append(await ask(engine, rng, n_prompt, next(numbers)))
            beside.append((background.n_tokens - n_before) / (perf_counter() - began))
            await observe(engine, background, alone, steps)
            await background.cancel()
            await asyncio.sleep(1)  # lets the engine move its cells out of the way
            for n_prompt in LENGTHS:
                await asyncio.sleep(0.5)
                ttfts["idle", n_prompt].append(await ask(engine, rng, n_prompt, next(numbers)))
    report(ttfts, median(steps), mean(alone), mean(beside))


def report(ttfts: dict[tuple[str, int], list[tuple[float, float]]], step_s: float, alone: float, beside: float) -> None:
    print(f"a step of the background work takes {1000 * step_s:.0f} ms; medians of {len(ttfts['idle', LENGTHS[0]])}:")
    print("| prompt tokens | TTFT idle, ms | busy | of that in the queue | the rest over idle |")
    print("|---|---|---|---|---|")
    for n_prompt in LENGTHS:
        idle = median(ttft for ttft, _ in ttfts["idle", n_prompt])
        busy = median(ttft for ttft, _ in ttfts["busy", n_prompt])
        waited = median(waited for _, waited in ttfts["busy", n_prompt])
        rest = median(ttft - waited for ttft, waited in ttfts["busy", n_prompt])
        print(f"| {n_prompt} | {1000 * idle:.0f} | {1000 * busy:.0f} | {1000 * waited:.0f} | {rest / idle:.2f} |")
    print(f"background work: {alone:.1f} tokens/s alone, {beside:.1f} beside the interactive requests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("-c", "--n-ctx", type=int, default=16384)
    parser.add_argument("--kv-layout", choices=["unified", "per-sequence", "auto"], default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--priority", type=int, default=100, help="of the background work")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
