#!/usr/bin/env python3
"""How images affect running streams: the time between two tokens of 8 streams, alone and while images arrive.

.venv/bin/python scripts/bench_media.py [-m model.gguf] [--mmproj mmproj.gguf] [--prefer latency] [--repeats 3]

Without --mmproj, a projector with random weights is written, of the size of SigLIP base at 224 pixels (86 million
weights, 196 tokens per image). Each repeat measures the streams alone, with images (a new one as soon as the text of
the last one starts), and with texts of the same number of tokens instead.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from cppbatch import EngineProcess, GenerationRequest, Media, MediaPrompt, SamplingParams
from cppbatch.bench.prompts import random_text
from cppbatch.config import EngineConfig
from cppbatch.models.inspect import inspect_model
from cppbatch.models.pull import choose_model
from tests.support.media_files import picture
from tests.support.tiny_projectors import SIGLIP_BASE, vision

N_STREAMS = 8
N_TEXT = 20  # tokens of text after an image

Prompts = Callable[[int], str | MediaPrompt]


class Streams:
    """Keeps 8 requests generating, and records when each token comes."""

    def __init__(self, engine: EngineProcess, numbers: Iterator[int]) -> None:
        self._engine, self._numbers = engine, numbers
        self.gaps: list[float] = []
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(N_STREAMS)]

    async def _go_on(self) -> None:
        while True:
            n = next(self._numbers)
            prompt = f"{n} " + random_text(Random(n), 30)
            params = SamplingParams(max_tokens=600, ignore_eos=True)
            last = 0.0
            async for event in self._engine.submit(GenerationRequest(id=f"s{n}", prompt=prompt, params=params)):
                now = perf_counter()
                if last and event.tokens:
                    self.gaps.append(now - last)
                last = now if event.tokens else last

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def arrive(engine: EngineProcess, prompts: Prompts, numbers: Iterator[int], ttfts: list[float]) -> None:
    """One request after the other, of one token each."""
    while True:
        n = next(numbers)
        began = perf_counter()
        request = GenerationRequest(id=f"p{n}", prompt=prompts(n), params=SamplingParams(max_tokens=1))
        async for _ in engine.submit(request):
            pass
        ttfts.append(perf_counter() - began)


async def measure(
    engine: EngineProcess, prompts: Prompts | None, numbers: Iterator[int], seconds: float
) -> tuple[list[float], list[float]]:
    """The gaps between tokens of the streams, and the TTFTs of what arrives beside them."""
    streams = Streams(engine, numbers)
    ttfts: list[float] = []
    await asyncio.sleep(1.5)
    streams.gaps.clear()
    others: list[Awaitable[None]] = []
    if prompts:
        others.append(asyncio.create_task(arrive(engine, prompts, numbers, ttfts)))
    await asyncio.sleep(seconds)
    gaps = list(streams.gaps)
    for task in others:
        task.cancel()  # type: ignore[attr-defined]
    await asyncio.gather(*others, return_exceptions=True)
    await streams.stop()
    return gaps, ttfts


async def run(args: argparse.Namespace, projector: Path) -> None:
    numbers = itertools.count(1000)
    config = EngineConfig(
        str(choose_model(args.model)), n_parallel=16, n_ctx=16384, mmproj=str(projector), spec="off", prefer=args.prefer
    )
    files = {n: picture(n, size=(320, 240)) for n in range(64)}
    kinds: dict[str, Prompts | None] = {
        "8 streams alone": None,
        "with images": lambda n: MediaPrompt(
            [Media("image", files[n % 64] + bytes(n % 251)), random_text(Random(n), N_TEXT)]
        ),
        "with texts of as many tokens": lambda n: f"{n} " + random_text(Random(n), SIGLIP_BASE.n_tokens + N_TEXT),
    }
    p50s: dict[str, list[float]] = {name: [] for name in kinds}
    p95s: dict[str, list[float]] = {name: [] for name in kinds}
    longest: dict[str, list[float]] = {name: [] for name in kinds}
    first: dict[str, list[float]] = {name: [] for name in kinds}
    async with EngineProcess(config) as engine:
        for _ in range(args.repeats):
            for name, prompts in kinds.items():
                gaps, ttfts = await measure(engine, prompts, numbers, args.seconds)
                p50s[name].append(float(np.percentile(gaps, 50)))
                p95s[name].append(float(np.percentile(gaps, 95)))
                longest[name].append(max(gaps))
                first[name] += ttfts
        idle: list[float] = []
        for n in range(5):
            began = perf_counter()
            images = kinds["with images"]
            assert images
            async for _ in engine.submit(
                GenerationRequest(id=f"i{n}", prompt=images(5000 + n), params=SamplingParams(max_tokens=1))
            ):
                pass
            idle.append(perf_counter() - began)
    print(f"medians of {args.repeats} turns of {args.seconds:g} s, in ms:")
    print("| | between two tokens, p50 | p95 | longest | arrived | their TTFT |")
    print("|---|---|---|---|---|---|")
    for name in kinds:
        ttft = f"{1000 * median(first[name]):.0f}" if first[name] else ""
        row = f"| {name} | {1000 * median(p50s[name]):.0f} | {1000 * median(p95s[name]):.0f} "
        row += f"| {1000 * median(longest[name]):.0f} "
        print(f"{row}| {len(first[name]) or ''} | {ttft} |")
    print(f"TTFT of an image on the idle engine: {1000 * median(idle):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file; without it the default model")
    parser.add_argument("--mmproj", type=Path, help="its projector; without it one with random weights")
    parser.add_argument("--prefer", default="balanced", help="as in serve: latency computes prompts in smaller pieces")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        projector = args.mmproj
        if projector is None:
            n_embd = inspect_model(choose_model(args.model)).n_embd
            projector = vision(Path(folder) / "mmproj.gguf", n_embd=n_embd or 0, shape=SIGLIP_BASE, quant="F16")
        asyncio.run(run(args, projector))


if __name__ == "__main__":
    main()
