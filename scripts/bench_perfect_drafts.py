"""What drafts could gain on this machine if all of them were right: each answer is given as its own `prediction`.

Usage: python scripts/bench_perfect_drafts.py MODEL.gguf [-B 1,4,16] [--workloads quote,code,job] [--repeats 3]
           [--new-tokens 64]

`cppbatch bench throughput --spec` measures what the drafts found in a text gain. The difference between both is what
the drafts miss; the rest is what rows cost here. A turn runs the requests without drafts, and then again with the texts
of the first run as predictions.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import msgspec

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.chat.template import ChatTemplate
from cppbatch.engine.request import RequestOptions


def run(
    engine: BatchInferenceEngine,
    prompts: Sequence[str],
    params: SamplingParams,
    at_once: int,
    predictions: Sequence[str | None],
) -> tuple[float, list[str]]:
    """Runs the prompts, `at_once` of them at a time. Returns tokens/s, prompts included, and the texts."""
    engine.clear_prefix_cache()
    waiting, texts, n_tokens, n_ended = deque(zip(prompts, predictions, strict=True)), dict[str, str](), 0, 0
    began = perf_counter()
    while waiting or n_ended < len(texts):
        while waiting and len(texts) - n_ended < at_once:
            prompt, prediction = waiting.popleft()
            salt = f"{len(texts)}/{prediction is None}"  # nothing but the prediction is a source of drafts
            options: RequestOptions = {"cache_salt": salt, "clamp_max_tokens": True, "prediction": prediction}
            texts[engine.add_request(prompt, params, **options)] = ""
        for event in engine.step():
            texts[event.request_id] += event.text
            if event.usage:
                n_ended += 1
                n_tokens += event.usage.completion_tokens
    return n_tokens / (perf_counter() - began), list(texts.values())


def speedups(engine: BatchInferenceEngine, name: str, at_once: int, repeats: int, new_tokens: int) -> list[float]:
    """The ratio of the tokens/s with predictions to those without drafts, for each turn."""
    workload, info = TEXT_WORKLOADS[name], engine.info
    template = ChatTemplate(info.chat_template or "", bos=info.bos, eos=info.eos)
    plain = SamplingParams(
        max_tokens=min(new_tokens, workload.max_tokens), temperature=0, json_schema=workload.schema, speculate=False
    )
    drafted = msgspec.structs.replace(plain, speculate=True)
    n = workload.rounds * max(4, at_once)
    ratios = []
    for turn in range(repeats + 1):
        messages = workload.prompts(n, f"{name}/{at_once}/{turn}")
        prompts = [template.render([{"role": "user", "content": message}]) for message in messages]
        without, texts = run(engine, prompts, plain, at_once, [None] * n)
        with_predictions, _ = run(engine, prompts, drafted, at_once, texts)
        ratios.append(with_predictions / without)
    return ratios[1:]  # in the first turn the engine measures the cost of steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-B", dest="batch_sizes", default="1,4,16")
    parser.add_argument("--workloads", default="quote,code,job")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=1024, help="of an answer at most (as the workload says)")
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    if unknown := set(args.workloads.split(",")) - set(TEXT_WORKLOADS):
        sys.exit(f"--workloads has {', '.join(sorted(unknown))}; known are {', '.join(TEXT_WORKLOADS)}")
    with BatchInferenceEngine(args.model, n_ctx=1024 * max(sizes), n_parallel=max(sizes)) as engine:
        if engine.info.chat_template is None:
            sys.exit(f"{args.model} has no chat template; the workloads are user messages")
        for name in args.workloads.split(","):
            for size in sizes:
                ratios = speedups(engine, name, size, args.repeats, args.new_tokens)
                each = " ".join(f"{ratio:.2f}" for ratio in ratios)
                print(f"{name}, B = {size}: {median(ratios):.2f}x ({each})", flush=True)


if __name__ == "__main__":
    main()
