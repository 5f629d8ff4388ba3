"""The same prompts one by one, then as one batch. The prefix cache is off, so the second run computes everything again.

.venv/bin/python examples/batch_speedup.py
"""

from __future__ import annotations

import argparse
from time import perf_counter

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

TOPICS = "bread rain foxes moonlight winter harbours chess copper honey sleep music salt bridges tea snow ink".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--max-tokens", type=int, default=40, help="new tokens for each prompt")
    parser.add_argument("--prompts", type=int, default=16, help="number of prompts (1 to 16)")
    args = parser.parse_args()

    prompts = [f"Here is what everybody should know about {topic}:" for topic in TOPICS[: args.prompts]]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)
    runs = {"one by one": [[prompt] for prompt in prompts], "one batch": [prompts]}
    seconds: dict[str, float] = {}
    with BatchInferenceEngine(args.model or pull_default(), n_parallel=16, prefix_cache=False, spec="off") as engine:
        engine.generate(prompts, SamplingParams(max_tokens=2))  # warm-up
        for name, batches in runs.items():
            began, first_step = perf_counter(), engine.stats().steps
            n_tokens = sum(len(result.tokens) for batch in batches for result in engine.generate(batch, params))
            seconds[name] = perf_counter() - began
            steps = engine.stats().steps - first_step
            print(f"{name:10}: {n_tokens} tokens, {steps} steps, {n_tokens / seconds[name]:.0f} tokens/s")
    print(f"The batch is {seconds['one by one'] / seconds['one batch']:.2f} times as fast.")


if __name__ == "__main__":
    main()
