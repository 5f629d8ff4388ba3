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
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from fleet.conversations import Conversation, Load, LogNormal, conversations
from fleet.result import FleetRun, possible_hits
from measuring import Comparison, script_arguments

from cppbatch import EngineConfig, GenerationRequest, SamplingParams
from cppbatch.bench.report import Column
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


async def run_turn(engine: RayEngine, turn: int, args: argparse.Namespace) -> dict[str, float]:
    """Lets clients take conversations, one after the other, until all are over."""
    load = Load(
        rate=1, seconds=1e9, seed=args.seed + turn, n_apps=args.apps, system_tokens=LogNormal(args.system_tokens, 0.3),
        user_tokens=LogNormal(40, 0.5), output_tokens=LogNormal(24, 0.5), turns=3, max_tokens=1900,
        n_vocab=min(32000, engine.info.n_vocab),
    )  # fmt: skip
    waiting = (conversation for _, conversation in itertools.islice(conversations(load), args.conversations))
    run = FleetRun()

    async def client() -> None:
        for conversation in waiting:
            await converse(engine, conversation, run)

    await asyncio.gather(*(client() for _ in range(args.clients)))
    prompt, cached, output = (
        sum(getattr(request, name) for request in run.finished) for name in ("n_prompt", "n_cached", "n_output")
    )
    return {
        "hit_rate": 100 * cached / prompt, "computed_prompt_tokens": prompt - cached, "prompt_tokens": prompt,
        "output_tokens_s": output / run.clock(), "ttft_p50": median(request.ttft for request in run.finished),
        "requests": len(run.finished), "possible": 100 * possible_hits(run.finished, 0.0) / prompt,
    }  # fmt: skip


async def converse(engine: RayEngine, conversation: Conversation, run: FleetRun) -> None:
    """Holds a conversation. Each answer has its planned length; the next prompt has the tokens that the model gave."""
    while (request := conversation.next_request()) is not None:
        request.arrived_at, request.replica = run.clock(), 0
        params = SamplingParams(temperature=0, max_tokens=request.n_output, ignore_eos=True)
        output = list[int]()
        async for event in engine.submit(
            GenerationRequest(id=request.id, prompt=request.request.prompt, params=params)
        ):
            if event.tokens and not output:
                request.first_token_at = run.clock()
            output += event.tokens
            if event.usage:
                request.n_cached = event.usage.cached_tokens
        request.finished_at = run.clock()
        assert len(output) == request.n_output
        conversation.answered(output)
        request.forget_tokens()
        run.finished.append(request)


if __name__ == "__main__":
    main()
