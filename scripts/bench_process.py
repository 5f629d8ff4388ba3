#!/usr/bin/env python3
"""What each layer above llama_decode costs at 16 streams: tokens/s relative to a bare loop over the same batch.

bare loop: llama_decode with 16 rows and nothing else. engine: `BatchInferenceEngine.step` in a loop. LocalEngine: with
asyncio, on a thread. EngineProcess: in a worker process. HTTP: `cppbatch serve` with 16 SSE streams. Each layer is a
process of its own, which loads the model once; then all are measured in short turns, because the speed of a shared
machine changes from minute to minute. The prompts are in the prefix cache, so that each step has 16 decode rows, and
there are no drafts.

    .venv/bin/python scripts/bench_process.py [-m model.gguf] [--turns 9] [--tokens 96] [--kv-layout per-sequence]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from random import Random
from time import perf_counter, process_time

import msgspec
import numpy as np
import psutil
from measuring import Comparison, MeasuringChild, answer_lines, script_arguments
from server_process import get_json, running_server, serve_command

from cppbatch import BatchInferenceEngine, GenerationRequest, LocalEngine, SamplingParams
from cppbatch.bench.load.client import LoadClient, TargetServer
from cppbatch.bench.load.workload import LoadRequest
from cppbatch.bench.prompts import random_prompt, random_text
from cppbatch.bench.report import Column
from cppbatch.bench.throughput import bare_loop
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.runtime import load_runtime
from cppbatch.llama import Batch
from cppbatch.models.pull import choose_model

PROMPT_TOKENS, WARM_UP, LIMIT_S = 32, 8, 300
BARE, ENGINE = "bare loop", "engine"


class Setting(msgspec.Struct):
    """What to measure."""

    model: str
    streams: int
    tokens: int
    kv_layout: str
    flash_attn: str
    threads: int

    def config(self) -> EngineConfig:
        fields = {
            "model_path": self.model, "n_ctx": self.n_ctx, "n_parallel": self.streams, "kv_layout": self.kv_layout,
            "flash_attn": self.flash_attn, "n_threads": self.threads, "spec": "off",
        }  # fmt: skip
        return msgspec.convert(fields, EngineConfig)

    @property
    def n_ctx(self) -> int:
        """The prompts have `PROMPT_TOKENS` words, with some vocabularies many more tokens."""
        return self.streams * (8 * PROMPT_TOKENS + self.tokens)

    def prompts(self) -> list[str]:
        return [random_text(Random(i), PROMPT_TOKENS) for i in range(self.streams)]

    def params(self, n_new: int) -> SamplingParams:
        return SamplingParams(max_tokens=n_new, temperature=0, ignore_eos=True)


class Counters(msgspec.Struct):
    """Some of the engine's statistics."""

    steps: int
    generated_tokens: int
    step_seconds: dict[str, float]


Figures = dict[str, float | None]


def figures(before: Counters, after: Counters, seconds: float, other_cpu: float | None = None) -> Figures:
    """Returns the figures of the time between two states of the counters: those of `COLUMNS`."""
    steps, tokens = after.steps - before.steps, after.generated_tokens - before.generated_tokens
    decode_s = after.step_seconds["decode"] - before.step_seconds["decode"]
    cpu = None if other_cpu is None else 100 * other_cpu / seconds
    return {"speed": tokens / seconds, "decode_ms": 1000 * decode_s / steps, "rows": tokens / steps, "cpu": cpu}


COLUMNS = [
    Column("speed", "tokens/s"), Column("decode_ms", "llama_decode, ms", 2), Column("rows", "rows a step"),
    Column("cpu", "other CPU, %"),
]  # fmt: skip


# --- the layers: each measures once for each question ----------------------------------------------------------------


def measure_bare_loop(setting: Setting) -> None:
    runtime = load_runtime(setting.config())
    runtime.context.use_threads(setting.threads or available_threads())  # not as many as were free while loading
    draw = np.random.default_rng(0)
    prompts = [random_prompt(draw, PROMPT_TOKENS, runtime.info.n_vocab) for _ in range(setting.streams)]
    batch = Batch(runtime.context.n_batch)

    def measure() -> Figures:
        bare_loop(runtime.context, batch, prompts, WARM_UP)
        speed = bare_loop(runtime.context, batch, prompts, setting.tokens).decode
        return {"speed": speed, "decode_ms": 1000 * setting.streams / speed, "rows": setting.streams}

    answer_lines(measure)
    runtime.close()


def measure_engine(setting: Setting) -> None:
    with BatchInferenceEngine(setting.config()) as engine:

        def run(n_new: int) -> None:
            for prompt in setting.prompts():
                engine.add_request(prompt, setting.params(n_new))
            while engine.has_work:
                engine.step()

        def counters() -> Counters:
            return msgspec.convert(engine.stats(), Counters, from_attributes=True)

        def measure() -> Figures:
            run(WARM_UP)
            before, began = counters(), perf_counter()
            run(setting.tokens)
            seconds = perf_counter() - began
            return figures(before, counters(), seconds)

        answer_lines(measure)


async def answer(
    setting: Setting,
    run: Callable[[int], Awaitable[object]],
    counters: Callable[[], Awaitable[Counters]],
    cpu_time: Callable[[], float] | None,
) -> None:
    """Answers in an event loop: each time a warm-up, then `setting.tokens` of each stream."""
    loop = asyncio.get_running_loop()

    async def measure() -> Figures:
        await run(WARM_UP)
        before, cpu_before, began = await counters(), cpu_time() if cpu_time else 0.0, perf_counter()
        await run(setting.tokens)
        seconds, cpu = perf_counter() - began, cpu_time() - cpu_before if cpu_time else None
        return figures(before, await counters(), seconds, cpu)

    await asyncio.to_thread(answer_lines, lambda: asyncio.run_coroutine_threadsafe(measure(), loop).result())


async def measure_client(
    kind: type[LocalEngine | EngineProcess], setting: Setting, cpu_time: Callable[[], float] | None
) -> None:
    """Measures an engine behind its asyncio interface. `cpu_time`: of this process, if the engine is another one."""
    client = kind(setting.config())

    async def stream(prompt: str, n_new: int) -> None:
        async for _ in client.submit(GenerationRequest(id=prompt, prompt=prompt, params=setting.params(n_new))):
            pass

    async def counters() -> Counters:
        return msgspec.convert(await client.stats(), Counters, from_attributes=True)

    async with client:
        await answer(
            setting, lambda n: asyncio.gather(*(stream(prompt, n) for prompt in setting.prompts())), counters, cpu_time
        )


async def measure_http(setting: Setting) -> None:
    """The client is this process."""
    command = serve_command(
        setting.model, "-np", setting.streams, "-c", setting.n_ctx, "--kv-layout", setting.kv_layout,
        "-fa", setting.flash_attn, "--spec", "off", "-t", setting.threads,
    )  # fmt: skip
    with running_server(command) as running:
        front = psutil.Process(running.process.pid)
        async with LoadClient(TargetServer(label="HTTP", url=running.url, model=""), LIMIT_S) as client:

            async def run(n_new: int) -> None:
                requests = [LoadRequest(prompt, n_new) for prompt in setting.prompts()]
                outcomes = await asyncio.gather(*(client.send(request, perf_counter()) for request in requests))
                if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
                    raise failures[0]

            async def counters() -> Counters:
                return msgspec.convert(await asyncio.to_thread(get_json, f"{running.url}/stats"), Counters)

            await answer(setting, run, counters, lambda: process_time() + float(sum(front.cpu_times()[:2])))


LAYERS: dict[str, Callable[[Setting], None]] = {
    BARE: measure_bare_loop,
    ENGINE: measure_engine,
    "LocalEngine": lambda setting: asyncio.run(measure_client(LocalEngine, setting, None)),
    "EngineProcess": lambda setting: asyncio.run(measure_client(EngineProcess, setting, process_time)),
    "HTTP": lambda setting: asyncio.run(measure_http(setting)),
}


def main() -> None:
    """Prints a row for each layer: medians, and the medians of the turns' ratios."""
    if sys.argv[1:2] == ["--child"]:
        LAYERS[sys.argv[2]](msgspec.json.decode(sys.argv[3], type=Setting))
        return
    parser = script_arguments(__doc__, turns=9)
    parser.add_argument("-n", "--streams", type=int, default=16, help="streams at once (16)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each (96)")
    parser.add_argument("--kv-layout", choices=["unified", "per-sequence"], default="per-sequence")
    parser.add_argument("-fa", "--flash-attn", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("-t", "--threads", type=int, default=0)
    args = vars(parser.parse_args())
    n_turns = args.pop("turns")
    setting = msgspec.json.encode(Setting(**{**args, "model": str(choose_model(args["model"]).absolute())})).decode()
    with ExitStack() as stack:
        layers = {
            name: stack.enter_context(MeasuringChild([sys.executable, __file__, "--child", name, setting]))
            for name in LAYERS
        }
        # The first turn loads the model.
        found = Comparison(LAYERS).measure(n_turns, lambda name, turn: layers[name].ask(), uncounted=1)
    print(found.table(COLUMNS, {"speed": "of the bare loop"}, digits=3), end="\n\n")
    print(found.table([], {"speed": "of the engine"}, base=ENGINE, digits=3))


if __name__ == "__main__":
    main()
