"""One prompt at 16 temperatures, side by side. The prompt is computed once for all of them.

.venv/bin/python examples/sixteen_temperatures.py "Once upon a time"
"""

from __future__ import annotations

import argparse

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

PROMPT = """The lighthouse stood on a rock at the end of the world. Nobody had come to visit for eleven years.
Every evening the keeper climbed the stairs, lit the lamp, and wrote the weather into his book. One night, in the middle
of a storm, somebody knocked at the door. He opened it and saw"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--max-tokens", type=int, default=24, help="new tokens at each temperature")
    args = parser.parse_args()

    temperatures = [i / 10 for i in range(16)]  # 0 is greedy
    settings = [
        SamplingParams(temperature=temperature, seed=args.seed, max_tokens=args.max_tokens)
        for temperature in temperatures
    ]
    with BatchInferenceEngine(args.model or pull_default(), n_parallel=16) as engine:
        results = engine.generate([args.prompt] * 16, settings)
        computed = engine.stats().prompt_tokens

    for temperature, result in zip(temperatures, results, strict=True):
        print(f"{temperature:.1f}  {' '.join(result.text.split())}")
    total = sum(result.usage.prompt_tokens for result in results)
    print(f"{computed} of {total} prompt tokens were computed.")


if __name__ == "__main__":
    main()
