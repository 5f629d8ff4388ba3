#!/usr/bin/env python3
"""The time to move a sequence to host memory and back, compared with computing it again.

The engine swaps a sequence out when others need its KV cells.

    .venv/bin/python scripts/bench_swap.py [-m model.gguf] [--tokens 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from cppbatch.bench.report import Column, Report, Spread
from cppbatch.config import EngineConfig, KvLayout
from cppbatch.engine.runtime import load_runtime
from cppbatch.errors import CppBatchError
from cppbatch.llama import Batch, Context
from cppbatch.models.pull import choose_model
from cppbatch.sizing.machine import this_machine

COLUMNS = [
    Column("kv_layout", "KV layout"),
    Column("tokens", "tokens"),
    Column("out_ms", "out, ms", 2),
    Column("in_ms", "in, ms", 2),
    Column("compute_ms", "compute again, ms", 1),
    Column("kib_a_token", "KiB a token", 1),
]


def main() -> None:
    """Measures both layouts and prints or writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file (the default model)")
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=-1, help="-1: all")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if min(args.tokens, args.repeats) < 1:
        parser.error("--tokens and --repeats must be at least 1")
    try:
        report = measure(str(choose_model(args.model)), args)
        Console().print(report.table())
        if args.json:
            report.write_json(args.json)
    except CppBatchError as error:
        sys.exit(f"bench_swap.py: {error}")


def measure(model: str, args: argparse.Namespace) -> Report:
    """Returns a report with a row for each KV layout."""
    layouts: list[KvLayout] = ["unified", "per-sequence"]
    return Report(
        kind="swap",
        title=f"{Path(model).stem}: a sequence moved to host memory and back",
        machine=this_machine(),
        model=Path(model).stem,
        settings={"tokens": args.tokens, "repeats": args.repeats, "n_gpu_layers": args.gpu_layers},
        columns=COLUMNS,
        rows=[_row(model, args, layout) for layout in layouts],
    )


def _row(model: str, args: argparse.Namespace, layout: KvLayout) -> dict[str, Any]:
    config = EngineConfig(
        model_path=model,
        n_ctx=2 * args.tokens,  # the original sequence and its restored copy
        n_parallel=2,
        n_gpu_layers=args.gpu_layers,
        kv_layout=layout,
        prefix_cache=False,
    )
    runtime = load_runtime(config)
    context = runtime.context
    assert isinstance(context, Context)
    try:
        tokens = np.random.default_rng(0).integers(10, runtime.info.n_vocab // 4, args.tokens).astype(np.int32)
        compute(context, tokens)  # warm-up
        computed, out, back = [], [], []
        for _ in range(args.repeats):
            computed.append(compute(context, tokens))
            began = perf_counter()
            state = context.save_sequence(0)
            out.append(perf_counter() - began)
            began = perf_counter()
            context.restore_sequence(1, state)
            back.append(perf_counter() - began)
            context.remove(1)
    finally:
        runtime.close()
    return {
        "kv_layout": layout,
        "tokens": args.tokens,
        "out_ms": Spread.of(1000 * seconds for seconds in out),
        "in_ms": Spread.of(1000 * seconds for seconds in back),
        "compute_ms": Spread.of(1000 * seconds for seconds in computed),
        "kib_a_token": state.n_bytes / args.tokens / 1024,
    }


def compute(context: Context, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> float:
    """Computes these tokens in sequence 0, after clearing it. Returns the seconds."""
    context.remove(0)
    batch = Batch(context.n_batch)
    began = perf_counter()
    for start in range(0, len(tokens), context.n_batch):
        part = tokens[start : start + context.n_batch]
        batch.clear()
        batch.add_run(part, start, 0, n_logits=1)
        context.decode(batch)
    return perf_counter() - began


if __name__ == "__main__":
    main()
