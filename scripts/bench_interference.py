#!/usr/bin/env python3
"""What a long prompt does to running streams: inter-token times of 8 streams, quiet and while 4,000 tokens are read.

.venv/bin/python scripts/bench_interference.py [-m model.gguf] [--kv-layout unified] [--target-step-ms 0]
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.models.pull import choose_model

STREAMS, PROMPT, QUIET_STEPS = 8, 4000, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--kv-layout", choices=["unified", "per-sequence"], default="unified")
    parser.add_argument("-fa", "--flash-attn", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--target-step-ms", type=float, default=0)
    args = parser.parse_args()
    model = choose_model(args.model)
    n_ctx = 16384 if args.kv_layout == "unified" else (STREAMS + 1) * 8192
    settings = {"kv_layout": args.kv_layout, "flash_attn": args.flash_attn, "target_step_ms": args.target_step_ms}
    with BatchInferenceEngine(model, n_ctx=n_ctx, n_parallel=STREAMS + 1, **settings) as engine:
        engine.generate([[20] * 512], SamplingParams(max_tokens=1))  # warm-up
        for i in range(STREAMS):
            engine.add_request([100 + i] * 64, SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True))
        while engine.stats().decode_steps < 10:
            engine.step()
        quiet = [timed_step(engine) for _ in range(QUIET_STEPS)]
        long = engine.add_request([200] * PROMPT, SamplingParams(max_tokens=1, temperature=0))
        busy, began, ended = [], perf_counter(), False
        while not ended:
            start = perf_counter()
            ended = any(event.request_id == long and event.finish_reason for event in engine.step())
            busy.append(perf_counter() - start)
        report(quiet, busy, perf_counter() - began)


def timed_step(engine: BatchInferenceEngine) -> float:
    """Seconds of a step, which is the inter-token time of every stream."""
    start = perf_counter()
    engine.step()
    return perf_counter() - start


def report(quiet: list[float], busy: list[float], seconds: float) -> None:
    for name, times in (("quiet", quiet), ("busy", busy)):
        p50, p95, worst = (1000 * float(np.percentile(times, q)) for q in (50, 95, 100))
        print(f"{name}: {len(times):>4} steps, inter-token p50 {p50:.1f} ms, p95 {p95:.1f} ms, worst {worst:.1f} ms")
    ratio = np.percentile(busy, 95) / np.percentile(quiet, 95)
    print(f"p95 busy / quiet: {ratio:.2f}; the prompt of {PROMPT} tokens took {seconds:.1f} s")


if __name__ == "__main__":
    main()
