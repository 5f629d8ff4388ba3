#!/usr/bin/env python3
"""Decode speed of the engine beside a bare loop over `llama_decode` with the same batch, in one run.

The bare loop feeds a fixed token to each sequence and samples nothing: it is the ceiling. The two take turns on one
context, so both see the same machine; the ratio is the median over the turns. "sampling" is its share of a step.

    .venv/bin/python scripts/bench_decode.py [-m model.gguf] [-B 1,4,16] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import msgspec
import numpy as np

from cppbatch.config import EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.metrics import PHASES
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.llama import Batch
from cppbatch.models.pull import choose_model

PROMPT, NEW = 128, 64
REQUESTS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0),
    "defaults": SamplingParams(),
    "penalised": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5),
    "chain": SamplingParams(typical_p=0.9, min_p=0),
    "json": SamplingParams(json_schema={"type": "array", "items": {"type": "number"}, "minItems": 1000}),
    "logprobs": SamplingParams(logprobs=5),
}


def main() -> None:
    args = _arguments()
    sizes = [int(size) for size in args.sizes.split(",")]
    config = EngineConfig(
        model_path=str(choose_model(args.model)),
        n_ctx=max(sizes) * (PROMPT + NEW + 64),
        n_parallel=max(sizes),
        n_threads=args.threads,
        kv_layout=args.kv_layout,
        flash_attn=args.flash_attn,
        sampling=args.sampling,
        prefix_cache=False,  # what it keeps would be in the bare loop's way
    )
    runtime = load_runtime(config)
    with BatchInferenceEngine(config, runtime=runtime) as engine:
        print(f"{runtime.info.name}: {PROMPT} prompt + {NEW} new tokens, {args.kv_layout}, FA {args.flash_attn}")
        print(f"{'B':>3} {'':>8} {'engine tok/s':>13} {'bare tok/s':>11} {'ratio':>7} {'sampling':>9}", end="")
        print("   step ms: " + "  ".join(PHASES))
        for size in sizes:
            for name in args.requests.split(","):
                _report(engine, runtime, size, name, args.repeats)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("-B", "--sizes", default="1,4,16")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--requests", default=",".join(REQUESTS), help="kinds of requests: " + ", ".join(REQUESTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-layout", choices=["unified", "per-sequence"], default="unified")
    parser.add_argument("--sampling", choices=["auto", "host", "backend"], default="auto")
    parser.add_argument("-fa", "--flash-attn", choices=["auto", "on", "off"], default="auto")
    return parser.parse_args()


def _report(engine: BatchInferenceEngine, runtime: Runtime, size: int, name: str, repeats: int) -> None:
    prompts = [[(7 * i + 3 * k) % 1000 + 10 for k in range(PROMPT)] for i in range(size)]
    params = msgspec.structs.replace(REQUESTS[name], max_tokens=NEW, ignore_eos=True)
    bare_loop(runtime, prompts), engine_loop(engine, prompts, params)  # warm-up
    before = engine.stats()
    turns = [(engine_loop(engine, prompts, params), bare_loop(runtime, prompts)) for _ in range(repeats)]
    after = engine.stats()
    steps = after.steps - before.steps
    split = [1000 * (after.step_seconds[name] - before.step_seconds[name]) / steps for name in PHASES]
    ours, bare = (statistics.median(turn[i] for turn in turns) for i in (0, 1))
    ratio = statistics.median(ours / bare for ours, bare in turns)
    share = split[PHASES.index("sample")] / sum(split)
    print(f"{size:>3} {name:>8} {ours:>13.1f} {bare:>11.1f} {ratio:>7.1%} {share:>9.2%}", end="")
    print("            " + "  ".join(f"{ms:.3f}" for ms in split), flush=True)


def engine_loop(engine: BatchInferenceEngine, prompts: list[list[int]], params: SamplingParams) -> float:
    """Decode tokens/s of the engine, from the end of the prefill on."""
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.stats().waiting or _prefilling(engine):
        engine.step()
    rows, start = engine.stats().decode_rows, perf_counter()
    while engine.has_work:
        engine.step()
    return (engine.stats().decode_rows - rows) / (perf_counter() - start)


def _prefilling(engine: BatchInferenceEngine) -> bool:
    return any(s.n_computed < s.n_prompt for s in engine._scheduler.running)


def bare_loop(runtime: Runtime, prompts: list[list[int]]) -> float:
    """Decode tokens/s of nothing but refilling the batch and `llama_decode`."""
    context, batch = runtime.context, Batch(runtime.context.n_batch)
    for seq_id, prompt in enumerate(prompts):
        batch.clear()
        batch.add_run(np.array(prompt, np.int32), 0, seq_id, n_logits=1)
        context.decode(batch)
    rows = list(range(len(prompts)))
    start = perf_counter()
    for position in range(PROMPT, PROMPT + NEW - 1):
        batch.clear()
        batch.add_rows([100] * len(rows), [position] * len(rows), rows)
        context.decode(batch)
        context.logits(len(rows))
    elapsed = perf_counter() - start
    for seq_id in rows:
        context.remove(seq_id)
    return len(rows) * (NEW - 1) / elapsed


if __name__ == "__main__":
    main()
