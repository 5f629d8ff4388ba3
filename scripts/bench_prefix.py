#!/usr/bin/env python3
"""Speedup by sharing prefixes: requests with a common prefix, and many completions of one prompt.

.venv/bin/python scripts/bench_prefix.py [-m model.gguf] [--kv-layout unified] [--repeats 3]
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import Any

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.models.pull import choose_model

N_REQUESTS, N_PARALLEL, N_PREFIX, N_SUFFIX, N_NEW = 48, 16, 600, 20, 32
PREFIX = [100 + i * 37 % 9000 for i in range(N_PREFIX)]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--kv-layout", choices=["unified", "per-sequence"], default="unified")
    parser.add_argument("-fa", "--flash-attn", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    settings = {"n_ctx": 16384, "n_parallel": N_PARALLEL, "kv_layout": args.kv_layout, "flash_attn": args.flash_attn}
    model = choose_model(args.model)
    with (
        BatchInferenceEngine(model, **settings) as cached,
        BatchInferenceEngine(model, prefix_cache=False, **settings) as plain,
    ):
        for engine in (cached, plain):
            engine.generate([[20] * 512], SamplingParams(max_tokens=1))  # warm-up
        print(f"{cached.info.name}, {args.kv_layout}, flash attention {args.flash_attn}\n")
        shared_prefix(cached, plain, args.repeats)
        completions(cached, plain, args.repeats)


def shared_prefix(cached: BatchInferenceEngine, plain: BatchInferenceEngine, repeats: int) -> None:
    prompts = [[*PREFIX, *(5000 + 100 * i + k for k in range(N_SUFFIX))] for i in range(N_REQUESTS)]
    params = SamplingParams(max_tokens=N_NEW, **GREEDY)
    peak, ratios, speeds = 0, [], []
    for _ in range(repeats):
        cached.clear_prefix_cache()
        seconds, cells = run(cached, prompts, [params] * N_REQUESTS)
        without, _ = run(plain, prompts, [params] * N_REQUESTS)
        peak = max(peak, cells)
        ratios.append(without / seconds)
        speeds.append(N_REQUESTS * N_NEW / seconds)
    print(
        f"{N_REQUESTS} requests, {N_PREFIX} common tokens, {N_SUFFIX} of their own, {N_NEW} new, {N_PARALLEL} at once:"
    )
    print(f"  {median(speeds):.1f} tok/s, {median(ratios):.2f} times as fast as without the prefix cache")
    bound = N_PREFIX + N_REQUESTS * (N_SUFFIX + N_NEW)
    print(f"  peak cells, of running and finished sequences: {peak}; prefix + all suffixes and outputs = {bound}\n")


def completions(cached: BatchInferenceEngine, plain: BatchInferenceEngine, repeats: int) -> None:
    params = [SamplingParams(max_tokens=N_NEW, temperature=0.2 + 0.1 * i, seed=i, ignore_eos=True) for i in range(16)]
    peak, ratios = 0, []
    for _ in range(repeats):
        cached.clear_prefix_cache()
        seconds, cells = run(cached, [PREFIX] * 16, params)
        peak = max(peak, cells)
        one_by_one = sum(run(plain, [PREFIX], [its])[0] for its in params)
        ratios.append(one_by_one / seconds)
    print(f"one prompt of {N_PREFIX} tokens x 16 settings, {N_NEW} new tokens each:")
    print(f"  {median(ratios):.2f} times as fast as one after the other without the prefix cache")
    print(f"  peak cells: {peak}; prompt + 16 outputs = {N_PREFIX + 16 * N_NEW}")


def run(engine: BatchInferenceEngine, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, int]:
    """Returns the seconds until all requests have ended, and the most cells used after a step."""
    began, peak = perf_counter(), 0
    for prompt, its in zip(prompts, params, strict=True):
        engine.add_request(prompt, its)
    while engine.has_work:
        engine.step()
        peak = max(peak, engine.core.kv.n_used + engine.core.kv.n_cached)
    return perf_counter() - began, peak


if __name__ == "__main__":
    main()
