#!/usr/bin/env python3
"""Routing over replicas of Ray Serve: by the prompt's prefix, and Serve's default, power of two choices, alternately.

.venv/bin/python scripts/bench_routing.py [-m model.gguf] [--replicas 3] [--turns 3] [--json FILE]

Starts a Ray cluster on this machine and, for each router, replicas of the model. Clients hold conversations of three
requests in the mean, without pauses. System prompts are shared; each turn of the benchmark has new ones. Lengths are
log-normal: system prompts of 400 tokens in the median, 40 from the user in each request, answers of 24.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from measuring import Comparison, script_arguments

from cppbatch import EngineConfig, GenerationRequest, SamplingParams
from cppbatch.bench.prompts import random_prompt
from cppbatch.bench.report import Column
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.models.pull import choose_model
from cppbatch.ray import cluster
from cppbatch.ray.engine import RayEngine

ROUTERS = ("prefix", "power-of-two")
COLUMNS = [
    Column("hit_rate", "hit rate, %", 0), Column("possible", "possible, %", 0),
    Column("computed_prompt_tokens", "prompt tokens computed", 0), Column("output_tokens_s", "output tokens/s", 0),
    Column("ttft_p50", "TTFT p50, s", 2),
]  # fmt: skip
APPLICATION = "cppbatch-routing"
NUMBERS = itertools.count()
LONGEST, MORE = 1900, 2 / 3  # tokens of a sequence; the probability of another request after each


def main() -> None:
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--conversations", type=int, default=36, help="of each turn")
    parser.add_argument("--apps", type=int, default=12, help="system prompts")
    parser.add_argument("--system-tokens", type=float, default=400, help="in the median")
    parser.add_argument("--seed", type=int, default=0, help="of the first turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        model_path=str(choose_model(args.model)), n_parallel=8, n_ctx=8 * 2048, kv_layout="per-sequence",
        n_threads=1, spec="off", max_queue=4096,
    )  # fmt: skip
    with cluster.connect(cluster.LOCAL, num_cpus=max(os.cpu_count() or 1, 2 * args.replicas)):
        found = asyncio.run(bench(config, args))
    print(f"{args.replicas} replicas, {args.clients} clients:\n")
    print(found.table(COLUMNS, {"output_tokens_s": "tokens/s, ratio"}, base="power-of-two"))
    if args.json:
        args.json.write_text(json.dumps(found.turns, indent=1))


async def bench(config: EngineConfig, args: argparse.Namespace) -> Comparison:
    """Measures each router in each turn."""
    engines = {router: deploy(config, router, args.replicas) for router in ROUTERS}
    try:
        for engine in engines.values():
            await engine.loaded()
        found = Comparison(ROUTERS)
        for router, turn in found.schedule(args.turns):
            found.note(router, turn, await run_turn(engines[router], turn, args))
        return found
    finally:
        for engine in engines.values():
            await engine.close()


def deploy(config: EngineConfig, router: str, n_replicas: int) -> RayEngine:
    """Replicas with this router, and the engine over them."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from cppbatch.ray.replica.deployment import engine_application
    from cppbatch.ray.replica.serve_replicas import ServeReplicas

    options: dict[str, Any] = {"num_replicas": n_replicas, "ray_actor_options": {"num_cpus": 1}}
    if router != "prefix":  # which is the application's own
        options["request_router_config"] = RequestRouterConfig()
    serve.start(proxy_location="Disabled")
    name = f"{APPLICATION}-{router}"
    began = perf_counter()
    serve.run(engine_application(config, **options), name=name, route_prefix=None)
    print(f"{n_replicas} replicas start in {perf_counter() - began:.1f} s", flush=True)
    return RayEngine(config, ServeReplicas(name))


@dataclass
class Turn:
    """The requests of one turn of the benchmark."""

    used: set[int] = field(default_factory=set)
    """System prompts that a request had."""
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    possible: int = 0
    """Prompt tokens that an earlier request had, as prompt or as output, with the same tokens before."""
    output: int = 0
    ttft: list[float] = field(default_factory=list)


def length(rng: np.random.Generator, median: float, sigma: float) -> int:
    """`sigma`: the standard deviation of the logarithm."""
    return max(1, round(median * float(np.exp(sigma * rng.standard_normal()))))


async def run_turn(engine: RayEngine, turn: int, args: argparse.Namespace) -> dict[str, float]:
    """Lets clients take conversations, one after the other, until all are over. The k-th most popular system prompt is
    used in proportion to 1 / k."""
    rng, n_vocab, run = np.random.default_rng(args.seed + turn), min(32_000, engine.info.n_vocab), Turn()
    systems = [length(rng, args.system_tokens, 0.3) for _ in range(args.apps)]
    prompts = [random_prompt(rng, min(n, LONGEST // 2), n_vocab).tolist() for n in systems]
    shares = 1 / np.arange(1, args.apps + 1)
    apps = rng.choice(args.apps, args.conversations, p=shares / shares.sum()).tolist()
    waiting, began = iter(enumerate(apps)), perf_counter()

    async def client() -> None:
        for number, app in waiting:
            own = np.random.default_rng((args.seed + turn, number))
            await converse(engine, own, app, prompts[app], run)

    await asyncio.gather(*(client() for _ in range(args.clients)))
    return {
        "hit_rate": 100 * run.cached / run.prompt, "computed_prompt_tokens": run.prompt - run.cached,
        "prompt_tokens": run.prompt, "output_tokens_s": run.output / (perf_counter() - began),
        "ttft_p50": median(run.ttft), "requests": run.requests, "possible": 100 * run.possible / run.prompt,
    }  # fmt: skip


async def converse(engine: EngineClient, rng: np.random.Generator, app: int, history: list[int], run: Turn) -> None:
    """Holds a conversation: each prompt has the one before, its answer, and what the user writes then."""
    known, is_first = 0, True
    while is_first or rng.random() < MORE:
        user = random_prompt(rng, length(rng, 40, 0.5), min(32_000, engine.info.n_vocab)).tolist()
        prompt, n_new, output = history + user, length(rng, 24, 0.5), list[int]()
        if len(prompt) + n_new > LONGEST:
            return
        run.possible += known or len(history) * (app in run.used)
        run.used.add(app)
        params = SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True)
        began = perf_counter()
        async for event in engine.submit(GenerationRequest(id=str(next(NUMBERS)), prompt=prompt, params=params)):
            if event.tokens and not output:
                run.ttft.append(perf_counter() - began)
            output += event.tokens
            if event.usage:
                run.cached += event.usage.cached_tokens
        assert len(output) == n_new
        run.requests, run.prompt, run.output = run.requests + 1, run.prompt + len(prompt), run.output + n_new
        history, known, is_first = prompt + output, len(prompt) + n_new - 1, False


if __name__ == "__main__":
    main()
