#!/usr/bin/env python3
"""Effect of a long prompt on running streams: inter-token times of 8 streams, alone and beside 4,000 prompt tokens.

When a stream ends, a new one with the same prompt starts. So the context length stays the same on average, and only the
long prompt makes a difference.

.venv/bin/python scripts/bench_interference.py [-m model.gguf] [--kv-layout unified] [--target-itl-ms 0]
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.models.pull import choose_model

STREAMS, PROMPT, STREAM_PROMPT, STREAM_NEW = 8, 4000, 64, 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--kv-layout", choices=["unified", "per-sequence"], default="unified")
    parser.add_argument("-fa", "--flash-attn", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--target-itl-ms", type=float, default=0)
    args = parser.parse_args()
    model = choose_model(args.model)
    n_ctx = 16384 if args.kv_layout == "unified" else (STREAMS + 1) * 8192
    settings = {"kv_layout": args.kv_layout, "flash_attn": args.flash_attn, "target_itl_ms": args.target_itl_ms}
    with BatchInferenceEngine(model, n_ctx=n_ctx, n_parallel=STREAMS + 1, **settings) as engine:
        engine.generate([[20] * 512], SamplingParams(max_tokens=1))  # warm-up
        start_streams(engine)
        measure(engine, until=None, steps=STREAM_NEW)  # later streams find their prompts cached
        quiet = measure(engine, until=None, steps=STREAM_NEW)
        long = engine.add_request([200] * PROMPT, SamplingParams(max_tokens=1, temperature=0))
        busy = measure(engine, until=long, steps=100_000)
        report(quiet, busy)


def start_streams(engine: BatchInferenceEngine) -> None:
    """Starts streams of different lengths, so that they do not end together."""
    for i in range(STREAMS):
        params = stream_params(STREAM_NEW * (i + 1) // STREAMS)
        engine.add_request([100 + i] * STREAM_PROMPT, params, request_id=f"0-{i}")


def stream_params(n_new: int) -> SamplingParams:
    return SamplingParams(max_tokens=n_new, temperature=0, ignore_eos=True)


def measure(engine: BatchInferenceEngine, *, until: str | None, steps: int) -> list[float]:
    """Runs `steps` steps, or until a request ends. Returns the seconds of each: every stream's inter-token time."""
    times: list[float] = []
    while len(times) < steps:
        start = perf_counter()
        ended = [event.request_id for event in engine.step() if event.finish_reason]
        times.append(perf_counter() - start)
        if until in ended:
            break
        for request_id in ended:
            n, i = map(int, request_id.split("-"))
            prompt = [100 + i] * STREAM_PROMPT
            engine.add_request(prompt, stream_params(STREAM_NEW), request_id=f"{n + 1}-{i}")
    return times


def report(quiet: list[float], busy: list[float]) -> None:
    for name, times in (("quiet", quiet), ("busy", busy)):
        p50, p95, worst = (1000 * float(np.percentile(times, q)) for q in (50, 95, 100))
        print(f"{name}: {len(times):>4} steps, inter-token p50 {p50:.1f} ms, p95 {p95:.1f} ms, worst {worst:.1f} ms")
    ratio = np.percentile(busy, 95) / np.percentile(quiet, 95)
    print(f"p95 busy / quiet: {ratio:.2f}; the prompt of {PROMPT} tokens took {sum(busy):.1f} s")


if __name__ == "__main__":
    main()
