#!/usr/bin/env python3
"""Measures what something else costs the running streams of a server: alone and beside it, alternately.

    .venv/bin/python scripts/bench_beside.py long-prompt [-m model.gguf] [--turns 3] [--seconds 8]
    .venv/bin/python scripts/bench_beside.py images,texts [--serve="--prefer latency"]
    .venv/bin/python scripts/bench_beside.py readers --streams 16 [--pages 5]

long-prompt: a prompt of 4,000 tokens, again and again. images, texts: requests with an image, or with a text of the
same number of tokens, one after another; the projector has random weights and the size of SigLIP base at 224 pixels.
readers: connections to GET /live. Streams that run at the end of the time run to their end.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measuring import Comparison, Figures, milliseconds, script_arguments, words
from server_process import RunningServer, cpu_seconds, load_client, running_server, serve_command

from cppbatch.bench.load.client import RequestOutcome
from cppbatch.bench.load.completion_stream import RequestFailure
from cppbatch.bench.load.workload import Endpoint, LoadRequest
from cppbatch.bench.prompts import random_text
from cppbatch.bench.report import Column
from cppbatch.errors import CppBatchError
from cppbatch.models.inspect import inspect_model
from cppbatch.models.pull import choose_model

LONG, N_TEXT, N_IMAGE = 4000, 20, 196  # tokens of a long prompt, of the text after an image, of the image
BESIDE = ["long-prompt", "images", "texts", "readers"]
COLUMNS = [
    Column("tokens_per_second", "tokens/s"), Column("gap_p50", "inter-token p50, ms", 0), Column("gap_p95", "p95", 0),
    Column("gap_longest", "longest", 0), Column("arrived", "arrived", 0), Column("ttft", "their TTFT, ms", 0),
    Column("failed", "failed", 0), Column("server_cpu", "server CPU", 2),
]  # fmt: skip
NUMBERS = itertools.count(1000)  # each prompt has its own


# --- what runs beside the streams -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(*works: Awaitable[None]) -> AsyncIterator[None]:
    """Runs these endless works during the block. Raises the error of one that failed."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def arrive(
    url: str, request: Callable[[int], LoadRequest], arrived: list[RequestOutcome], endpoint: Endpoint = "chat"
) -> None:
    """Sends requests, one after another. Raises `RequestFailure`."""
    async with load_client(url, endpoint) as client:
        while True:
            outcome = await client.send(request(next(NUMBERS)), perf_counter())
            if outcome.failure:
                raise outcome.failure
            arrived.append(outcome)


def text_request(n_tokens: int) -> Callable[[int], LoadRequest]:
    return lambda n: LoadRequest(f"{n} {random_text(Random(n), n_tokens)}", 1)


def image_request(n: int) -> LoadRequest:
    from tests.support.media_files import picture

    data = base64.b64encode(picture(n % 64, size=(320, 240)) + bytes(n % 251)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    text = {"type": "text", "text": random_text(Random(n), N_TEXT)}
    return LoadRequest([{"role": "user", "content": [image, text]}], 1)


async def read_live(url: str) -> None:
    """Reads GET /live and does nothing with it."""
    async with aiohttp.ClientSession(read_bufsize=1 << 22) as session, session.get(f"{url}/live") as response:
        while await response.content.readany():
            pass


def beside(
    name: str, url: str, n_pages: int, arrived: list[RequestOutcome]
) -> contextlib.AbstractAsyncContextManager[None]:
    """Returns what runs beside the streams during the block. `arrived`: gets the requests that it sends."""
    works: dict[str, Callable[[], list[Awaitable[None]]]] = {
        "alone": list,
        "long-prompt": lambda: [arrive(url, text_request(LONG), arrived, "completions")],
        "images": lambda: [arrive(url, image_request, arrived)],
        "texts": lambda: [arrive(url, text_request(N_IMAGE + N_TEXT), arrived)],
        "readers": lambda: [read_live(url) for _ in range(n_pages)],
    }
    return running(*works[name]())


# --- a measurement ----------------------------------------------------------------------------------------------------


async def measure(server: RunningServer, name: str, args: argparse.Namespace) -> Figures:
    """Runs the streams beside this for `args.seconds`."""
    outcomes, arrived = list[RequestOutcome](), list[RequestOutcome]()
    async with load_client(server.url) as client, beside(name, server.url, args.pages, arrived):
        began, end = perf_counter(), perf_counter() + args.seconds
        cpu = cpu_seconds(server.process.pid)

        async def stream(i: int) -> None:
            while perf_counter() < end:
                prompt = f"Stream {i} tells story {next(NUMBERS)} of {os.getpid()}:"
                outcomes.append(await client.send(LoadRequest(prompt, args.tokens), perf_counter()))

        await asyncio.gather(*(stream(i) for i in range(args.streams)))
        seconds = perf_counter() - began
        used = cpu_seconds(server.process.pid) - cpu
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    for failure in {str(outcome.failure) for outcome in outcomes if outcome.failure}:
        print(f"  {name}: {failure}", file=sys.stderr)
    return {
        "tokens_per_second": sum(outcome.output_tokens for outcome in outcomes) / seconds,
        "gap_p50": milliseconds(gaps, 50), "gap_p95": milliseconds(gaps, 95), "gap_longest": milliseconds(gaps, 100),
        "arrived": len(arrived) or None, "ttft": milliseconds([each.time_to_first_token for each in arrived], 50),
        "failed": sum(outcome.failure is not None for outcome in outcomes),
        "server_cpu": used / seconds,
    }  # fmt: skip


def main() -> None:
    """Prints a row for each state: medians, and the medians of the turns' ratios to the streams alone."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("beside", type=words, help=f"some of {', '.join(BESIDE)}")
    parser.add_argument("--seconds", type=float, default=8, help="of a measurement (8)")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (128)")
    parser.add_argument("--serve", default="", help='more flags of `cppbatch serve`: --serve="--prefer latency"')
    parser.add_argument("--pages", type=int, default=5, help="readers (5)")
    args = parser.parse_args()
    if unknown := set(args.beside) - set(BESIDE):
        parser.error(f"{', '.join(unknown)}: name some of {', '.join(BESIDE)}")
    names, model = ["alone", *args.beside], choose_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        flags: list[Any] = ["-np", 16, "-c", 16384, "--spec", "off", "--data-dir", folder, *args.serve.split()]
        if "images" in names:
            flags += ["--mmproj", random_projector(Path(folder, "mmproj.gguf"), model)]
        with running_server(serve_command(model, *flags)) as server:
            found = Comparison(names).measure(
                args.turns, lambda name, _: asyncio.run(measure(server, name, args)), uncounted=1
            )
    shown = [column for column in COLUMNS if any(found.median(name, column.key) is not None for name in names)]
    print(f"{model.stem}: {args.streams} streams, medians of {args.turns} turns of {args.seconds:g} s:\n")
    print(found.table(shown, {"tokens_per_second": "tokens/s, of alone", "gap_p95": "p95, of alone"}))


def random_projector(path: Path, model: Path) -> Path:
    from tests.support.tiny_projectors import SIGLIP_BASE, vision

    return vision(path, n_embd=inspect_model(model).n_embd or 0, shape=SIGLIP_BASE, quant="F16")


if __name__ == "__main__":
    try:
        main()
    except (CppBatchError, RequestFailure) as error:
        sys.exit(f"bench_beside.py: {error}")
