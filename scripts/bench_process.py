#!/usr/bin/env python3
"""What each layer above llama_decode costs at 16 streams: tokens/s relative to a bare loop over the same batch.

bare loop: llama_decode with 16 rows and nothing else. engine: `BatchInferenceEngine.step` in a loop. LocalEngine: with
asyncio, on a thread. EngineProcess: in a worker process. HTTP: `cppbatch serve` with 16 SSE streams. Each layer is a
process of its own, which loads the model once; then all are measured in short turns, because the speed of a shared
machine changes from minute to minute. The prompts are in the prefix cache, so that each step has 16 decode rows, and
there are no drafts.

    .venv/bin/python scripts/bench_process.py [-m model.gguf] [--turns 9] [--tokens 96] [-n 16] [-t 1]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from random import Random
from time import perf_counter, process_time
from typing import Any

import msgspec
import numpy as np
import psutil
from measuring import Comparison, Figures, MeasuringChild, answer_lines, script_arguments
from server_process import get_json, load_client, running_server, serve_command

from cppbatch import BatchInferenceEngine, GenerationRequest, LocalEngine, SamplingParams
from cppbatch.bench.load.workload import LoadRequest
from cppbatch.bench.prompts import random_prompt, random_text
from cppbatch.bench.report import Column
from cppbatch.bench.throughput import bare_loop
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.runtime import load_runtime
from cppbatch.llama import Batch
from cppbatch.models.pull import choose_model

PROMPT_TOKENS, WARM_UP = 32, 8
BARE, ENGINE = "bare loop", "engine"
COLUMNS = [
    Column("speed", "tokens/s"), Column("decode_ms", "llama_decode, ms", 2), Column("rows", "rows a step"),
    Column("cpu", "other CPU, %"),
]  # fmt: skip


def prompts(config: EngineConfig) -> list[str]:
    return [random_text(Random(i), PROMPT_TOKENS) for i in range(config.n_parallel)]


def params(n_new: int) -> SamplingParams:
    return SamplingParams(max_tokens=n_new, temperature=0, ignore_eos=True)


def measure_bare_loop(config: EngineConfig, n_new: int) -> None:
    runtime = load_runtime(config)
    runtime.context.use_threads(config.n_threads or available_threads())  # not as many as were free while loading
    draw, n = np.random.default_rng(0), config.n_parallel
    ids = [random_prompt(draw, PROMPT_TOKENS, runtime.info.n_vocab) for _ in range(n)]
    batch = Batch(runtime.context.n_batch)

    def measure() -> Figures:
        bare_loop(runtime.context, batch, ids, WARM_UP)
        speed = bare_loop(runtime.context, batch, ids, n_new).decode
        return {"speed": speed, "decode_ms": 1000 * n / speed, "rows": n}

    answer_lines(measure)
    runtime.close()


# --- the other layers: how to run all streams, the engine's statistics, and the CPU time of the processes beside it ---

Layer = tuple[Callable[[int], Awaitable[object]], Callable[[], Awaitable[Any]], Callable[[], float] | None]


@asynccontextmanager
async def engine_layer(config: EngineConfig) -> AsyncIterator[Layer]:
    with BatchInferenceEngine(config) as engine:

        async def run(n_new: int) -> None:
            for prompt in prompts(config):
                engine.add_request(prompt, params(n_new))
            while engine.has_work:
                engine.step()

        async def stats() -> Any:
            return engine.stats()

        yield run, stats, None


@asynccontextmanager
async def client_layer(kind: type[LocalEngine | EngineProcess], config: EngineConfig) -> AsyncIterator[Layer]:
    """An engine behind its asyncio interface."""
    client = kind(config)

    async def stream(prompt: str, n_new: int) -> None:
        async for _ in client.submit(GenerationRequest(id=prompt, prompt=prompt, params=params(n_new))):
            pass

    async with client:
        yield (
            lambda n_new: asyncio.gather(*(stream(prompt, n_new) for prompt in prompts(config))), client.stats,
            process_time if kind is EngineProcess else None,
        )  # fmt: skip


@asynccontextmanager
async def http_layer(config: EngineConfig) -> AsyncIterator[Layer]:
    """The client is this process."""
    command = serve_command(
        config.model_path, "-np", config.n_parallel, "-c", config.n_ctx, "--kv-layout", config.kv_layout,
        "--spec", "off", "-t", config.n_threads,
    )  # fmt: skip
    with running_server(command) as running:
        front = psutil.Process(running.process.pid)
        async with load_client(running.url) as client:

            async def run(n_new: int) -> None:
                sends = (client.send(LoadRequest(prompt, n_new), perf_counter()) for prompt in prompts(config))
                for outcome in await asyncio.gather(*sends):
                    if outcome.failure:
                        raise outcome.failure

            yield (
                run, partial(asyncio.to_thread, get_json, f"{running.url}/stats"),
                lambda: process_time() + float(sum(front.cpu_times()[:2])),
            )  # fmt: skip


async def measure_layer(opened: AbstractAsyncContextManager[Layer], n_new: int) -> None:
    """Answers questions in an event loop: each time a warm-up, then `n_new` tokens of each stream."""
    loop = asyncio.get_running_loop()
    async with opened as (run, stats, cpu_time):

        async def counters() -> tuple[int, int, float]:
            found = msgspec.to_builtins(await stats())
            return found["steps"], found["generated_tokens"], found["step_seconds"]["decode"]

        async def measure() -> Figures:
            await run(WARM_UP)
            before, cpu, began = await counters(), cpu_time() if cpu_time else 0.0, perf_counter()
            await run(n_new)
            seconds, used = perf_counter() - began, cpu_time() - cpu if cpu_time else None
            steps, tokens, decode_s = (b - a for a, b in zip(before, await counters(), strict=True))
            return {
                "speed": tokens / seconds, "rows": tokens / steps, "cpu": used and 100 * used / seconds,
                "decode_ms": 1000 * decode_s / steps,
            }  # fmt: skip

        await asyncio.to_thread(answer_lines, lambda: asyncio.run_coroutine_threadsafe(measure(), loop).result())


LAYERS: dict[str, Callable[[EngineConfig], AbstractAsyncContextManager[Layer]]] = {
    ENGINE: engine_layer,
    "LocalEngine": partial(client_layer, LocalEngine),
    "EngineProcess": partial(client_layer, EngineProcess),
    "HTTP": http_layer,
}


def child(name: str, config: EngineConfig, n_new: int) -> None:
    if name == BARE:
        measure_bare_loop(config, n_new)
    else:
        asyncio.run(measure_layer(LAYERS[name](config), n_new))


def main() -> None:
    """Prints a row for each layer: medians, and the medians of the turns' ratios."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], msgspec.json.decode(sys.argv[3], type=EngineConfig), int(sys.argv[4]))
        return
    parser = script_arguments(__doc__, turns=9)
    parser.add_argument("-n", "--streams", type=int, default=16, help="streams at once (16)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each (96)")
    parser.add_argument("-t", "--threads", type=int, default=0)
    args = parser.parse_args()
    config = EngineConfig(
        model_path=str(choose_model(args.model).absolute()), n_parallel=args.streams, kv_layout="per-sequence",
        n_ctx=args.streams * (8 * PROMPT_TOKENS + args.tokens),  # a word may be several tokens
        n_threads=args.threads, spec="off",
    )  # fmt: skip
    given, names = msgspec.json.encode(config).decode(), [BARE, *LAYERS]
    with ExitStack() as stack:
        layers = {
            name: stack.enter_context(MeasuringChild([sys.executable, __file__, "--child", name, given, args.tokens]))
            for name in names
        }
        # The first turn loads the model.
        found = Comparison(names).measure(args.turns, lambda name, turn: layers[name].ask(), uncounted=1)
    print(found.table(COLUMNS, {"speed": "of the bare loop"}, digits=3), end="\n\n")
    print(found.table([], {"speed": "of the engine"}, base=ENGINE, digits=3))


if __name__ == "__main__":
    main()
