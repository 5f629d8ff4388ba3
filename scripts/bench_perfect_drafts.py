#!/usr/bin/env python3
"""Measures what drafts could gain on this machine if all were right: each answer is given as its own `prediction`.

    .venv/bin/python scripts/bench_perfect_drafts.py -m MODEL.gguf [-B 1,4,16] [--workloads quote,code,job] [--turns 3]

`cppbatch bench throughput --spec` measures what the drafts found in a text gain. The difference between both is what
the drafts miss; the rest is what rows cost here. A turn runs the requests without drafts, and then again with the texts
of the first run as predictions.
"""

from __future__ import annotations

import sys

from measuring import numbers, script_arguments, words
from msgspec.structs import replace

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.report import Spread
from cppbatch.bench.speculation_speedup import LEAST_AT_ONCE, chat_prompt, run_prompts
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.models.pull import choose_model


def speedups(engine: BatchInferenceEngine, name: str, at_once: int, turns: int, new_tokens: int) -> Spread:
    """Returns the ratios of the tokens/s with predictions to those without drafts."""
    workload = TEXT_WORKLOADS[name]
    plain = SamplingParams(
        max_tokens=min(new_tokens, workload.max_tokens), temperature=0, json_schema=workload.schema, speculate=False
    )
    ratios = []
    for turn in range(turns + 1):
        seed = f"{name}/{at_once}/{turn}"
        messages = workload.prompts(workload.rounds * max(LEAST_AT_ONCE, at_once), seed)
        prompts = [chat_prompt(engine.info, message) for message in messages]
        without = run_prompts(engine, prompts, plain, at_once, salt=f"{seed}/plain")
        texts = [answer.text for answer in without.answers]
        found = run_prompts(
            engine, prompts, replace(plain, speculate=True), at_once, salt=f"{seed}/drafted", predictions=texts
        )
        ratios.append(found.tokens_per_second / without.tokens_per_second)
    return Spread.of(ratios[1:])  # in the first turn the engine measures the cost of steps


def main() -> None:
    """Prints a line for each workload and batch size."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("-B", dest="batch_sizes", type=numbers, default=[1, 4, 16])
    parser.add_argument("--workloads", type=words, default=["quote", "code", "job"])
    parser.add_argument("--new-tokens", type=int, default=1024, help="of an answer at most (as the workload says)")
    args = parser.parse_args()
    if unknown := set(args.workloads) - set(TEXT_WORKLOADS):
        sys.exit(f"--workloads has {', '.join(sorted(unknown))}; known are {', '.join(TEXT_WORKLOADS)}")
    most = max(args.batch_sizes)
    with BatchInferenceEngine(choose_model(args.model), n_ctx=1024 * most, n_parallel=most) as engine:
        for name in args.workloads:
            for size in args.batch_sizes:
                gain = speedups(engine, name, size, args.turns, args.new_tokens)
                print(f"{name}, B = {size}: {gain.range_text(2)}", flush=True)


if __name__ == "__main__":
    main()
