"""Texts that repeat their prompt, one by one, with and without speculative decoding: the same texts in fewer steps.

.venv/bin/python examples/speculative_decoding.py
"""

from __future__ import annotations

import argparse
from time import perf_counter

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

FUNCTION = '''def select_{thing}s({thing}s, limit={limit}):
    """Returns the {thing}s whose price is above the limit."""
    result = []
    for {thing} in {thing}s:
        if {thing}["price"] > limit:
            result.append({thing})
    return result
'''
THINGS = "order invoice ticket parcel".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--max-tokens", type=int, default=80, help="new tokens for each prompt")
    args = parser.parse_args()

    prompts = [
        f"{FUNCTION.format(thing=thing, limit=10 + i)}\n# The same function, but `result` is called `found`:\n\ndef"
        for i, thing in enumerate(THINGS)
    ]
    texts, seconds = [], []
    with BatchInferenceEngine(args.model or pull_default(), n_parallel=1) as engine:
        engine.generate(prompts[:1], SamplingParams(max_tokens=args.max_tokens), cache_salt="warm-up")
        for name, speculate in (("without drafts", False), ("with drafts", True)):
            params = SamplingParams(max_tokens=args.max_tokens, temperature=0, speculate=speculate)
            began, first_step = perf_counter(), engine.stats().steps
            results = engine.generate(prompts, params, cache_salt=name)  # nothing is taken from the run before
            seconds.append(perf_counter() - began)
            texts.append([result.text for result in results])
            tokens, accepted, drafted = (
                sum(getattr(result.usage, count) for result in results)
                for count in ("completion_tokens", "accepted_tokens", "drafted_tokens")
            )
            steps = engine.stats().steps - first_step
            print(f"{name:14}: {tokens} tokens, {steps} steps, {accepted} of {drafted} draft tokens accepted")
    same = sum(one == other for one, other in zip(*texts, strict=True))
    print(f"{same} of {len(prompts)} texts are the same, {seconds[0] / seconds[1]:.2f} times as fast.")


if __name__ == "__main__":
    main()
