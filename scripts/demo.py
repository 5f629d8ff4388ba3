#!/usr/bin/env python3
"""Five short demonstrations of batching, each a screen of output.

basic       four prompts, one batch
throughput  the same prompts one by one, and all at once
lengths     short prompts beside a very long one
stress      hundreds of requests into few KV cells: all of them finish
streaming   every sequence of a batch as it grows, side by side

    .venv/bin/python scripts/demo.py streaming [-m model.gguf]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from time import perf_counter
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cppbatch import BatchInferenceEngine, Completion, CppBatchError, SamplingParams
from cppbatch.models.pull import choose_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a fox who",
    "The three primary colours are",
    "To bake a simple bread, you need",
    "The sun rises in the",
    "Water boils when",
    "My favourite thing about winter is",
    "A good friend is somebody who",
    "The first computers were",
    "In the middle of the ocean there is",
    "The best way to learn a language is",
    "Cats and dogs are different because",
    "The moon is far away, but",
    "On Monday morning the baker",
    "A triangle has",
    "When it rains in the mountains,",
]
SENTENCE = "The old lighthouse keeper wrote down the weather, the ships and the tides in his book every single day. "
console = Console()


def basic(model: str, small: bool) -> None:
    """Four prompts in one call."""
    with BatchInferenceEngine(model) as engine:
        began = perf_counter()
        results = engine.generate(PROMPTS[:4], greedy(8 if small else 32))
        took = perf_counter() - began
        steps = engine.stats().steps
    table = Table("prompt", "continuation", "tokens", "ended by", title="engine.generate(prompts)", show_lines=True)
    for prompt, result in zip(PROMPTS[:4], results, strict=True):
        table.add_row(prompt, one_line(result.text), str(len(result.tokens)), result.finish_reason.value)
    console.print(table)
    tokens = n_tokens(results)
    say(f"{tokens} tokens in {took:.1f} s and {steps} steps: each step computes a token of every sequence.")


def throughput(model: str, small: bool) -> None:
    """The same work one by one and all at once; without a prefix cache, so that nothing is computed in advance."""
    prompts, params = (PROMPTS[:4], greedy(8)) if small else (PROMPTS, greedy(40))
    table = Table("", "tokens", "steps", "seconds", "tokens/s", title=f"{len(prompts)} prompts")
    with BatchInferenceEngine(model, n_parallel=16, prefix_cache=False) as engine:
        engine.generate(prompts, greedy(2))  # warm-up
        seconds = []
        for name, batches in (("one by one", [[prompt] for prompt in prompts]), ("one batch", [prompts])):
            began, before = perf_counter(), engine.stats().steps
            tokens = sum(n_tokens(engine.generate(batch, params)) for batch in batches)
            seconds.append(perf_counter() - began)
            steps = engine.stats().steps - before
            table.add_row(name, str(tokens), str(steps), f"{seconds[-1]:.2f}", f"{tokens / seconds[-1]:.0f}")
    console.print(table)
    say(f"The batch is {seconds[0] / seconds[1]:.2f} times as fast: a step of many sequences reads the weights once.")


def lengths(model: str, small: bool) -> None:
    """A long prompt is read in pieces beside the others, which go on meanwhile."""
    sentences = (0, 1, 2, 8) if small else (0, 0, 2, 8, 60)
    n_batch = 64 if small else 256
    prompts = [SENTENCE * n + PROMPTS[i] for i, n in enumerate(sentences)]
    with BatchInferenceEngine(model, n_batch=n_batch) as engine:
        results = engine.generate(prompts, greedy(8 if small else 12))
    table = Table("prompt tokens", "first token after", "ended after", "continuation", title="one batch")
    for result in results:
        use = result.usage
        times = (f"{use.first_token_seconds:.3f} s", f"{use.total_seconds:.3f} s")
        table.add_row(str(use.prompt_tokens), *times, one_line(result.text)[:60])
    console.print(table)
    first, last = results[0].usage, results[-1].usage
    say(f"A step takes up to {n_batch} tokens, so it took {last.first_token_seconds:.2f} s to read the longest prompt.")
    began, ended = first.first_token_seconds, first.total_seconds
    say(f"The shortest one had its first token after {began:.2f} s, and its last after {ended:.2f} s.")


def stress(model: str, small: bool) -> None:
    """More requests than cells: sequences are swapped to host memory and come back, and none is lost."""
    n_requests, n_ctx = (24, 256) if small else (200, 512)
    with BatchInferenceEngine(model, n_ctx=n_ctx, kv_layout="unified") as engine:
        wanted = {}
        for i in range(n_requests):
            params = greedy(56 if i % 8 < 2 and i < n_requests / 2 else 3)
            wanted[engine.add_request(f"{i}. {PROMPTS[i % 16]}", params)] = params.max_tokens
        got = run_showing_cells(engine, n_requests)
        stats = engine.stats()
    full = sum(got[request] == tokens for request, tokens in wanted.items())
    say(f"The requests had {stats.prompt_tokens + got.total():,} tokens in all, and there were {n_ctx} cells.")
    say(f"Cells given up: {stats.swaps} times to host memory, {stats.recomputes} times to be computed again.")
    say(f"{full} of {n_requests} requests have all their tokens.")
    if full != n_requests:
        sys.exit(1)


def run_showing_cells(engine: BatchInferenceEngine, n_requests: int) -> Counter[str]:
    """Steps to the end, with a row of the table for each eighth of the requests. Gives each one's tokens."""
    table = Table("finished", "running", "waiting", "cells in use", "swapped out so far", title="stress")
    got: Counter[str] = Counter()
    finished = 0
    with Live(table, console=console, refresh_per_second=8):
        while engine.has_work:
            for event in engine.step():
                got[event.request_id] += len(event.tokens)
                finished += event.finish_reason is not None
            if finished >= table.row_count * n_requests / 8:
                now = engine.stats()
                cells = f"{now.kv_cells_used} of {now.kv_cells}"
                table.add_row(str(finished), str(now.running), str(now.waiting), cells, str(now.swaps))
    console.print()
    return got


def streaming(model: str, small: bool) -> None:
    """A panel for each sequence. Without a terminal only the last state of the screen is printed."""
    prompts = PROMPTS[:4] if small else PROMPTS[:6]
    with BatchInferenceEngine(model) as engine:
        texts = {}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=8 if small else 64, seed=i, ignore_eos=True)
            texts[engine.add_request(prompt, params)] = Text(prompt, style="bold")
        steps = 0
        with Live(panels(texts), console=console, refresh_per_second=12) as live:
            while engine.has_work:
                for event in engine.step():
                    texts[event.request_id].append(event.text.replace("\n", " "), style="not bold")
                live.update(panels(texts))
                steps += 1
    console.print()
    say(f"{len(texts)} sequences grew together in {steps} steps; each event named the one it belonged to.")


def panels(texts: dict[str, Text]) -> Columns:
    width = max(24, console.width // 2 - 2)
    return Columns([Panel(text, title=name, width=width) for name, text in texts.items()])


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


def n_tokens(results: list[Completion]) -> int:
    return sum(len(result.tokens) for result in results)


def one_line(text: str) -> str:
    return " ".join(text.split())


def say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


DEMOS: dict[str, Any] = {f.__name__: f for f in (basic, throughput, lengths, stress, streaming)}


def main() -> None:
    """Runs the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", choices=DEMOS)
    parser.add_argument("-m", "--model", help="GGUF file (the default model)")
    parser.add_argument("--small", action="store_true", help="fewer and shorter texts, as in the tests")
    args = parser.parse_args()
    try:
        DEMOS[args.demo](str(choose_model(args.model)), args.small)
    except CppBatchError as error:
        sys.exit(f"demo.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
