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

import argparse
import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from random import Random
from statistics import median
from time import perf_counter, process_time

import msgspec
import numpy as np
import psutil

from cppbatch import BatchInferenceEngine, GenerationRequest, LocalEngine, SamplingParams
from cppbatch.bench.load.client import LoadClient
from cppbatch.bench.load.target import Target, probe_server
from cppbatch.bench.load.workload import LoadRequest
from cppbatch.bench.prompts import random_prompt, random_text
from cppbatch.bench.report import markdown_table
from cppbatch.bench.throughput import bare_loop
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.runtime import load_runtime
from cppbatch.llama import Batch, Context
from cppbatch.models.pull import choose_model
from cppbatch.sizing.child_process import running_server

PROMPT_TOKENS, WARM_UP, LIMIT_S = 32, 8, 300
BARE, ENGINE = "bare loop", "engine"


class Result(msgspec.Struct):
    """One measurement."""

    tokens_per_second: float
    decode_ms: float
    """In llama_decode, of a step."""
    rows: float
    """Tokens of a step."""
    front_cpu: float | None = None
    """CPU time of the processes other than the engine's, as a share of a core."""


class Setting(msgspec.Struct):
    """What to measure."""

    model: str
    streams: int
    tokens: int
    kv_layout: str
    flash_attn: str
    threads: int

    def config(self) -> EngineConfig:
        return msgspec.convert(
            {
                "model_path": self.model,
                "n_ctx": self.n_ctx,
                "n_parallel": self.streams,
                "kv_layout": self.kv_layout,
                "flash_attn": self.flash_attn,
                "n_threads": self.threads,
                "spec": "off",
            },
            EngineConfig,
        )

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


def result(before: Counters, after: Counters, seconds: float, front_cpu: float | None = None) -> Result:
    """Returns the figures of the time between two states of the counters."""
    steps, tokens = after.steps - before.steps, after.generated_tokens - before.generated_tokens
    decode_s = after.step_seconds["decode"] - before.step_seconds["decode"]
    return Result(tokens / seconds, 1000 * decode_s / steps, tokens / steps, front_cpu)


# --- the layers: each measures once for each line of stdin --------------------------------------------------------


def report(measured: Result) -> None:
    print(msgspec.json.encode(measured).decode(), flush=True)


async def turns() -> AsyncIterator[None]:
    while await asyncio.to_thread(sys.stdin.readline):
        yield


def measure_bare_loop(setting: Setting) -> None:
    runtime = load_runtime(setting.config())
    runtime.context.use_threads(setting.threads or available_threads())  # not as many as were free while loading
    assert isinstance(runtime.context, Context)
    draw = np.random.default_rng(0)
    prompts = [random_prompt(draw, PROMPT_TOKENS, runtime.info.n_vocab) for _ in range(setting.streams)]
    batch = Batch(runtime.context.n_batch)
    for _ in sys.stdin:
        bare_loop(runtime.context, batch, prompts, WARM_UP)
        speed = bare_loop(runtime.context, batch, prompts, setting.tokens).decode
        report(Result(speed, 1000 * setting.streams / speed, setting.streams))
    runtime.close()


def measure_engine(setting: Setting) -> None:
    with BatchInferenceEngine(setting.config()) as engine:

        def run(n_new: int) -> None:
            for prompt in setting.prompts():
                engine.add_request(prompt, setting.params(n_new))
            while engine.has_work:
                engine.step()

        for _ in sys.stdin:
            run(WARM_UP)
            before, began = msgspec.convert(engine.stats(), Counters, from_attributes=True), perf_counter()
            run(setting.tokens)
            seconds = perf_counter() - began
            report(result(before, msgspec.convert(engine.stats(), Counters, from_attributes=True), seconds))


async def measure_client(client: EngineClient, setting: Setting, cpu_time: Callable[[], float] | None) -> None:
    """Measures 16 streams of an engine behind this asyncio interface."""

    async def stream(prompt: str, n_new: int) -> None:
        request = GenerationRequest(id=prompt, prompt=prompt, params=setting.params(n_new))
        async for _ in client.submit(request):
            pass

    async def counters() -> Counters:
        return msgspec.convert(await client.stats(), Counters, from_attributes=True)

    async def run(n_new: int) -> None:
        await asyncio.gather(*(stream(prompt, n_new) for prompt in setting.prompts()))

    async with client:
        async for _ in turns():
            report(await between_counters(run, counters, setting.tokens, cpu_time))


async def measure_local(setting: Setting) -> None:
    await measure_client(LocalEngine(setting.config()), setting, None)  # this process is the engine's


async def measure_process(setting: Setting) -> None:
    await measure_client(EngineProcess(setting.config()), setting, process_time)


async def measure_http(setting: Setting) -> None:
    """The client is this process."""
    sizes = ["-np", setting.streams, "-c", setting.n_ctx, "--kv-layout", setting.kv_layout, "-fa", setting.flash_attn]
    sizes += ["--spec", "off"]
    command = [sys.executable, "-m", "cppbatch", "serve", "-m", setting.model, *sizes, "-t", setting.threads]
    with running_server(list(map(str, command))) as running:
        target = Target("HTTP", running.url)
        server = await probe_server(target, model=None, endpoint="completions", api_key=None, timeout=LIMIT_S)
        front = psutil.Process(running.process.pid)

        async with LoadClient(server, LIMIT_S) as client:

            async def run(n_new: int) -> None:
                requests = [LoadRequest(prompt, n_new) for prompt in setting.prompts()]
                outcomes = await asyncio.gather(*(client.send(request, perf_counter()) for request in requests))
                if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
                    raise failures[0]

            async def counters() -> Counters:
                return msgspec.json.decode(await asyncio.to_thread(get, f"{running.url}/stats"), type=Counters)

            def cpu_time() -> float:
                user, system = front.cpu_times()[:2]
                return process_time() + float(user + system)

            async for _ in turns():
                report(await between_counters(run, counters, setting.tokens, cpu_time))


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        body: bytes = answer.read()
    return body


async def between_counters(
    run: Callable[[int], Awaitable[None]],
    counters: Callable[[], Awaitable[Counters]],
    n_new: int,
    cpu_time: Callable[[], float] | None,
) -> Result:
    """Runs a warm-up, then `n_new` tokens of each stream."""
    await run(WARM_UP)
    before, cpu_before, began = await counters(), cpu_time() if cpu_time else 0.0, perf_counter()
    await run(n_new)
    seconds, cpu = perf_counter() - began, cpu_time() - cpu_before if cpu_time else None
    return result(before, await counters(), seconds, None if cpu is None else cpu / seconds)


LAYERS: dict[str, Callable[[Setting], None]] = {
    BARE: measure_bare_loop,
    ENGINE: measure_engine,
    "LocalEngine": lambda setting: asyncio.run(measure_local(setting)),
    "EngineProcess": lambda setting: asyncio.run(measure_process(setting)),
    "HTTP": lambda setting: asyncio.run(measure_http(setting)),
}


# --- turns --------------------------------------------------------------------------------------------------------


class Layer:
    """A process that measures one layer."""

    def __init__(self, name: str, setting: Setting) -> None:
        command = [sys.executable, __file__, "--child", name, msgspec.json.encode(setting).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self) -> Result:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Result)

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends the process, which stops when its stdin ends."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(LIMIT_S)


def table(measured: list[dict[str, Result]]) -> str:
    """Returns a row for each layer: medians, and the medians of the turns' ratios."""
    rows = []
    for layer in LAYERS:
        results = [turn[layer] for turn in measured]
        ratios = [turn[layer].tokens_per_second / turn[BARE].tokens_per_second for turn in measured]
        of_engine = [turn[layer].tokens_per_second / turn[ENGINE].tokens_per_second for turn in measured]
        cpu = [each.front_cpu for each in results if each.front_cpu is not None]
        rows.append([
            layer,
            f"{median(each.tokens_per_second for each in results):.1f}",
            f"{median(ratios):.1%} ({min(ratios):.1%} to {max(ratios):.1%})",
            f"{median(of_engine):.1%}",
            f"{median(each.decode_ms for each in results):.2f}",
            f"{median(each.rows for each in results):.1f}",
            f"{median(cpu):.1%}" if cpu else "-",
        ])  # fmt: skip
    titles = ["", "tokens/s", "of the bare loop", "of the engine", "llama_decode, ms", "rows a step", "other CPU"]
    return markdown_table(titles, rows)


def main() -> None:
    """Prints a row for each layer."""
    if sys.argv[1:2] == ["--child"]:
        LAYERS[sys.argv[2]](msgspec.json.decode(sys.argv[3], type=Setting))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file (the default model)")
    parser.add_argument("-n", "--streams", type=int, default=16, help="streams at once (16)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each (96)")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--kv-layout", choices=["unified", "per-sequence"], default="per-sequence")
    parser.add_argument("-fa", "--flash-attn", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("-t", "--threads", type=int, default=0)
    args = vars(parser.parse_args())
    n_turns = args.pop("turns")
    setting = Setting(**{**args, "model": str(choose_model(args["model"]).absolute())})
    measured = []
    with ExitStack() as stack:
        layers = {name: stack.enter_context(Layer(name, setting)) for name in LAYERS}
        for layer in layers.values():  # loads the model
            layer.measure()
        for i in range(n_turns):
            order = list(LAYERS)[:: -1 if i % 2 else 1]
            measured.append({name: layers[name].measure() for name in order})
            speeds = ", ".join(f"{name} {measured[-1][name].tokens_per_second:.0f}" for name in LAYERS)
            print(f"turn {i + 1}, tokens/s: {speeds}", file=sys.stderr, flush=True)
    print(table(measured))


if __name__ == "__main__":
    main()
