#!/usr/bin/env python3
"""Measures moving a sequence to host memory and back, compared with computing it again.

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
from measuring import script_arguments
from rich.console import Console

from cppbatch.bench.prompts import random_prompt
from cppbatch.bench.report import Column, Report, Spread
from cppbatch.bench.throughput import bare_loop
from cppbatch.config import EngineConfig, KvLayout
from cppbatch.engine.runtime import load_runtime
from cppbatch.errors import CppBatchError
from cppbatch.llama import Batch
from cppbatch.models.pull import choose_model
from cppbatch.sizing.machine import this_machine

LAYOUTS: list[KvLayout] = ["unified", "per-sequence"]
COLUMNS = [
    Column("kv_layout", "KV layout"), Column("tokens", "tokens"), Column("out_ms", "out, ms", 2),
    Column("in_ms", "in, ms", 2), Column("compute_ms", "compute again, ms", 1),
    Column("kib_a_token", "KiB a token", 1),
]  # fmt: skip


def main() -> None:
    """Measures both layouts and prints or writes the report."""
    parser = script_arguments(__doc__, turns=5)
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=-1, help="-1: all")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    try:
        model = choose_model(args.model)
        report = Report(
            kind="swap", title=f"{model.stem}: a sequence moved to host memory and back", machine=this_machine(),
            model=model.stem, columns=COLUMNS, rows=[row(model, args, layout) for layout in LAYOUTS],
            settings={"tokens": args.tokens, "repeats": args.turns, "n_gpu_layers": args.gpu_layers},
        )  # fmt: skip
        Console().print(report.table())
        if args.json:
            report.write_json(args.json)
    except CppBatchError as error:
        sys.exit(f"bench_swap.py: {error}")


def row(model: Path, args: argparse.Namespace, layout: KvLayout) -> dict[str, Any]:
    """Measures one layout, with cells for the original sequence and its restored copy."""
    runtime = load_runtime(
        EngineConfig(
            str(model), n_ctx=2 * args.tokens, n_parallel=2, n_gpu_layers=args.gpu_layers, kv_layout=layout,
            prefix_cache=False,
        )
    )  # fmt: skip
    context: Any = runtime.context
    prompt = random_prompt(np.random.default_rng(0), args.tokens, runtime.info.n_vocab)
    batch, times = Batch(context.n_batch), {"compute_ms": [0.0], "out_ms": [0.0], "in_ms": [0.0]}
    try:
        for _ in range(1 + args.turns):
            times["compute_ms"].append(1000 * args.tokens / bare_loop(context, batch, [prompt], 1).prefill)
            for start in range(0, args.tokens, context.n_batch):
                batch.clear()
                batch.add_run(prompt[start : start + context.n_batch], start, 0, n_logits=1)
                context.decode(batch)
            began = perf_counter()
            state = context.save_sequence(0)
            saved = perf_counter()
            context.restore_sequence(1, state)
            times["in_ms"].append(1000 * (perf_counter() - saved))
            times["out_ms"].append(1000 * (saved - began))
            for seq_id in (0, 1):
                context.remove(seq_id)
    finally:
        runtime.close()
    spreads = {name: Spread.of(values[2:]) for name, values in times.items()}  # without the warm-up
    return {"kv_layout": layout, "tokens": args.tokens, **spreads, "kib_a_token": state.n_bytes / args.tokens / 1024}


if __name__ == "__main__":
    main()
