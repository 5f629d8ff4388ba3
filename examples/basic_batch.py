"""Four prompts in one call. Every step computes one token of each of them.

.venv/bin/python examples/basic_batch.py
"""

from __future__ import annotations

import argparse
from time import perf_counter

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a fox who",
    "The three primary colours are",
    "To bake a simple bread, you need",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--max-tokens", type=int, default=32, help="new tokens for each prompt")
    args = parser.parse_args()

    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)
    with BatchInferenceEngine(args.model or pull_default()) as engine:
        began = perf_counter()
        results = engine.generate(PROMPTS, params)
        seconds = perf_counter() - began
        steps = engine.stats().steps

    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"{prompt!r} -> {result.text!r} ({len(result.tokens)} tokens, {result.finish_reason.value})")
    n_tokens = sum(len(result.tokens) for result in results)
    print(f"{n_tokens} tokens in {steps} steps and {seconds:.1f} s")


if __name__ == "__main__":
    main()
