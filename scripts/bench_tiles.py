#!/usr/bin/env python3
"""Decode speed at every batch size beside the next multiple of four: where do the kernels compute rows in tiles?

Kernels that compute rows in tiles of 4 and 16 take as long for 15 rows as for 16, or longer, as the rows of an
incomplete tile may be computed one by one. The sizes are measured alternately on one engine for each KV layout. `of its
share` is tokens/s relative to that many rows of the next tile's step: 1 where both steps take equally long.

    .venv/bin/python scripts/bench_tiles.py [-m model.gguf] [-B 3,7,11,13,15] [--turns 5]
"""

from __future__ import annotations

import argparse
from statistics import median

import msgspec
import numpy as np

from cppbatch import BatchInferenceEngine
from cppbatch.bench.prompts import random_prompt
from cppbatch.bench.report import markdown_table
from cppbatch.bench.throughput import REQUEST_KINDS, engine_loop
from cppbatch.config import EngineConfig
from cppbatch.models.pull import choose_model

PROMPT_TOKENS, WARM_UP, TILE = 32, 4, 4


def main() -> None:
    """Prints a table for each KV layout."""
    args = _arguments()
    for layout in args.layouts:
        config = EngineConfig(
            model_path=str(choose_model(args.model)),
            n_ctx=args.sizes[-1] * (PROMPT_TOKENS + args.tokens),
            n_parallel=args.sizes[-1],
            kv_layout=layout,
            flash_attn=args.flash_attn,
            n_threads=args.threads,
            prefix_cache=False,
        )
        with BatchInferenceEngine(config) as engine:
            for size in args.sizes:
                decode_speed(engine, size, WARM_UP)
            speeds: dict[int, list[float]] = {size: [] for size in args.sizes}
            for _ in range(args.turns):
                for size in args.sizes:
                    speeds[size].append(decode_speed(engine, size, args.tokens))
        print(f"{layout}, flash attention {args.flash_attn}, medians of {args.turns} turns:\n\n{table(speeds)}\n")


def decode_speed(engine: BatchInferenceEngine, n: int, n_new: int) -> float:
    """Returns the tokens/s of `n` sequences that only decode."""
    draw = np.random.default_rng(n)
    prompts = [random_prompt(draw, PROMPT_TOKENS, engine.info.n_vocab) for _ in range(n)]
    params = msgspec.structs.replace(REQUEST_KINDS["greedy"], ignore_eos=True)
    return engine_loop(engine, prompts, params, n_new)[0].decode


def next_tile(n: int) -> int:
    return -(-n // TILE) * TILE


def table(speeds: dict[int, list[float]]) -> str:
    """Returns a row for each batch size: medians, and medians of the turns' ratios."""
    rows = []
    for n, values in speeds.items():
        tile = next_tile(n)
        ratio = median(a / b for a, b in zip(values, speeds[tile], strict=True))
        step_ms = median(1000 * n / value for value in values)
        rows.append(
            [str(n), f"{median(values):.1f}", f"{step_ms:.2f}", str(tile), f"{ratio:.2f}", f"{ratio * tile / n:.2f}"]
        )
    return markdown_table(["B", "tokens/s", "step, ms", "next tile", "of its tokens/s", "of its share"], rows)


def _arguments() -> argparse.Namespace:
    def sizes(given: str) -> list[int]:
        named = {int(size) for size in given.split(",")}
        return sorted(named | {next_tile(size) for size in named})

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file (the default model)")
    parser.add_argument("-B", "--sizes", type=sizes, default=list(range(1, 21)), help="batch sizes (1 to 20)")
    parser.add_argument("--layouts", type=lambda names: names.split(","), default=["per-sequence", "unified"])
    parser.add_argument("-fa", "--flash-attn", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each sequence (32)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
