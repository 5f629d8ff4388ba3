#!/usr/bin/env python3
"""Decode speed of the engine compared with llama-batched-bench, llama.cpp's own loop in C++, alternately.

Each turn runs both in new processes, for one KV layout and all batch sizes. The ratio is the median of the turns.
PEERS is a folder with llama-batched-bench, built from the library's version of llama.cpp with the same flags.

    .venv/bin/python scripts/bench_peer.py PEERS [-B 1,8,16,32] [--turns 5] [-m model.gguf] [-t 2]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from cppbatch.bench.report import read_report
from cppbatch.config import available_threads
from cppbatch.models.pull import choose_model

PROMPT, NEW = 64, 64
LIMIT_S = 600


def main() -> None:
    """Prints a line for each KV layout and batch size."""
    args = _arguments()
    model, sizes = choose_model(args.model), [int(size) for size in args.sizes.split(",")]
    print(f"{model.stem}: decode tokens/s, {PROMPT} prompt + {NEW} new tokens, flash attention on, -t {args.threads}")
    for layout in ("unified", "per-sequence"):
        ours, theirs = [], []
        for _ in range(args.turns):
            theirs.append(batched_bench(args.peers, model, layout, args.sizes, args.threads))
            ours.append(engine(model, layout, args.sizes, args.threads))
        for size in sizes:
            ratios = [a[size] / b[size] for a, b in zip(ours, theirs, strict=True)]
            print(
                f"{layout:>12}  B = {size:<3} engine {median(turn[size] for turn in ours):6.1f}  "
                f"llama-batched-bench {median(turn[size] for turn in theirs):6.1f}  "
                f"ratio {median(ratios):.1%} ({min(ratios):.1%} to {max(ratios):.1%})",
                flush=True,
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path)
    parser.add_argument("-m", "--model")
    parser.add_argument("-B", "--sizes", default="1,8,16,32")
    parser.add_argument("-t", "--threads", type=int, default=available_threads())
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


def batched_bench(peers: Path, model: Path, layout: str, sizes: str, threads: int) -> dict[int, float]:
    """Returns the S_TG column (decode tokens/s), by batch size."""
    cells = max(map(int, sizes.split(","))) * (PROMPT + NEW)
    command = [
        peers / "llama-batched-bench", "-m", model, "-c", cells, "-b", 2048, "-ub", 512, "-t", threads, "-fa", "on",
        "-npp", PROMPT, "-ntg", NEW, "-npl", sizes, *(["-kvu"] if layout == "unified" else []),
    ]  # fmt: skip
    rows = [line.split("|") for line in output_of(command).splitlines() if line.startswith("|")]
    column = {name.strip(): i for i, name in enumerate(rows[0])}
    return {int(row[column["B"]]): float(row[column["S_TG t/s"]]) for row in rows[2:]}


def engine(model: Path, layout: str, sizes: str, threads: int) -> dict[int, float]:
    """Returns the engine's decode tokens/s, by batch size."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "cppbatch", "bench", "throughput", "-m", model, "-B", sizes, "-t", threads,
            "--layouts", layout, "--flash-attns", "on", "--prompt-tokens", PROMPT, "--new-tokens", NEW,
            "--repeats", 1, "--json", file,
        ]  # fmt: skip
        output_of(command)
        return {row["batch_size"]: row["decode"].median for row in read_report(file).rows}


def output_of(command: list[object]) -> str:
    """Returns the command's stdout. Exits with its stderr if it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
