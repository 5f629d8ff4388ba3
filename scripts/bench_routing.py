#!/usr/bin/env python3
"""Routing over replicas of Ray Serve: by the prompt's prefix, and Serve's default, power of two choices, alternately.

.venv/bin/python scripts/bench_routing.py [-m model.gguf] [--replicas 3] [--turns 3] [--json FILE]

Starts a Ray cluster on this machine and, for each router, replicas of the model. Clients hold conversations of three
requests in the mean, without pauses. System prompts are shared; each turn of the benchmark has new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from fleet.conversations import Conversation, Load, LogNormal, conversations

from cppbatch import EngineConfig, GenerationRequest, SamplingParams
from cppbatch.models.pull import choose_model
from cppbatch.ray import cluster
from cppbatch.ray.engine import RayEngine

ROUTERS = ("prefix", "power-of-two")
APPLICATION = "cppbatch-routing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--conversations", type=int, default=36, help="of each turn")
    parser.add_argument("--apps", type=int, default=12, help="system prompts")
    parser.add_argument("--system-tokens", type=float, default=400, help="in the median")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        model_path=str(choose_model(args.model)), n_parallel=8, n_ctx=8 * 2048, kv_layout="per-sequence",
        n_threads=1, spec="off", max_queue=4096,
    )  # fmt: skip
    with cluster.connect(cluster.LOCAL, num_cpus=max(os.cpu_count() or 1, 2 * args.replicas)):
        results = asyncio.run(bench(config, args))
    print_table(results, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


async def bench(config: EngineConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each turn of each router."""
    engines = {router: deploy(config, router, args.replicas) for router in ROUTERS}
    try:
        results = []
        for engine in engines.values():
            await engine.loaded()
        for turn in range(args.turns):
            for router in ROUTERS if turn % 2 == 0 else ROUTERS[::-1]:
                result = await run_turn(engines[router], args.seed + turn, args)
                results.append({"router": router, "turn": turn} | result)
                print(json.dumps(results[-1]), flush=True)
        return results
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


async def run_turn(engine: RayEngine, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Clients take conversations, one after the other, until all are over."""
    load = Load(
        rate=1, seconds=1e9, seed=seed, n_apps=args.apps, system_tokens=LogNormal(args.system_tokens, 0.3),
        user_tokens=LogNormal(40, 0.5), output_tokens=LogNormal(24, 0.5), turns=3, max_tokens=1900,
        n_vocab=min(32000, engine.info.n_vocab),
    )  # fmt: skip
    waiting = (conversation for _, conversation in itertools.islice(conversations(load), args.conversations))
    counts: Counter[str] = Counter()
    ttft: list[float] = []
    began = perf_counter()
    await asyncio.gather(*(client(engine, waiting, counts, ttft) for _ in range(args.clients)))
    seconds = perf_counter() - began
    return {
        **counts,
        "hit_rate": counts["cached_tokens"] / counts["prompt_tokens"],
        "computed_prompt_tokens": counts["prompt_tokens"] - counts["cached_tokens"],
        "output_tokens_s": counts["output_tokens"] / seconds,
        "ttft_p50": median(ttft),
        "seconds": seconds,
    }


async def client(engine: RayEngine, waiting: Iterator[Conversation], counts: Counter[str], ttft: list[float]) -> None:
    """Holds conversations, until none is left."""
    for conversation in waiting:
        while (turn := conversation.next_request()) is not None:
            params = SamplingParams(temperature=0, max_tokens=len(turn.output), ignore_eos=True)
            request = GenerationRequest(id=f"{turn.request.id}-{id(turn)}", prompt=turn.request.prompt, params=params)
            began, output = perf_counter(), list[int]()
            async for event in engine.submit(request):
                if event.tokens and not output:
                    ttft.append(perf_counter() - began)
                output += event.tokens
                usage = event.usage
            assert usage is not None
            assert len(output) == len(turn.output)
            conversation.answered(output)
            counts["requests"] += 1
            counts["prompt_tokens"] += usage.prompt_tokens
            counts["cached_tokens"] += usage.cached_tokens
            counts["output_tokens"] += len(output)


def print_table(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Medians of the turns, as Markdown."""
    columns = "hit rate | prompt tokens computed | output tokens/s | TTFT p50, s |"
    print(f"\n| {args.replicas} replicas, {args.clients} clients | {columns}")
    print("|---|---|---|---|---|")
    for router in ROUTERS:
        ours = [result for result in results if result["router"] == router]
        hit, computed, speed, ttft = (
            median(result[name] for result in ours)
            for name in ("hit_rate", "computed_prompt_tokens", "output_tokens_s", "ttft_p50")
        )
        print(f"| {router} | {hit:.0%} | {computed:,.0f} | {speed:.0f} | {ttft:.2f} |")
    ratios = [
        a["output_tokens_s"] / b["output_tokens_s"]
        for a, b in zip(*([r for r in results if r["router"] == router] for router in ROUTERS), strict=True)
    ]
    print(f"\ntokens/s, prefix by power of two: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
