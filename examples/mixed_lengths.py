"""A long prompt is computed in chunks, while short prompts run and finish.

.venv/bin/python examples/mixed_lengths.py
"""

from __future__ import annotations

import argparse

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

SENTENCE = "The lighthouse keeper wrote down the weather, the ships and the tides in his book every single day. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--max-tokens", type=int, default=12, help="new tokens for each prompt")
    parser.add_argument("--sentences", type=int, nargs="+", default=[0, 1, 2, 8, 60], help="length of each prompt")
    parser.add_argument("--batch-size", type=int, default=256, help="maximum tokens per step")
    args = parser.parse_args()

    prompts = [SENTENCE * n + "Tonight the sea" for n in args.sentences]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)
    with BatchInferenceEngine(args.model or pull_default(), n_batch=args.batch_size) as engine:
        results = engine.generate(prompts, params)
    for result in results:
        usage = result.usage
        print(
            f"{usage.prompt_tokens:5} prompt tokens: first token after {usage.first_token_seconds:.3f} s, "
            f"last after {usage.total_seconds:.3f} s: {result.text!r:.60}"
        )


if __name__ == "__main__":
    main()
