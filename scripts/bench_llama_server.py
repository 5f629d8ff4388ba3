#!/usr/bin/env python3
"""Compares cppbatch serve with llama-server under the same load, alternately: tokens/s, TTFT, inter-token times.

For each load llama-server first runs with unified cells and with a stream for each sequence, with and without flash
attention and with smaller cache types, and the fastest flags are kept. Then both servers run, and each turn measures
one after the other. The load is that of `cppbatch bench serve`. For the loads of speculative decoding (quote, json,
code, job, free) llama-server's kinds of n-gram drafts are tried as well. --same-prefix: all turns of shared-prefix have
the same prefix, and the first one, which computes it, is not counted.

    .venv/bin/python scripts/bench_llama_server.py PEERS/llama-server [-m model.gguf] [--load mixed,fan-out] [--turns 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measuring import Comparison, Figures, markdown_table, numbers, script_arguments, words
from server_process import (
    add_load_options,
    cpu_seconds,
    make_load,
    measure_server,
    running_servers,
    serve_command,
)  # fmt: skip

from cppbatch.bench.prompts import Lengths
from cppbatch.bench.report import Column
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.config import available_threads
from cppbatch.errors import CppBatchError
from cppbatch.models.pull import choose_model

OURS, THEIRS = "cppbatch", "llama-server"
FIND_TURNS, PREFIX_SEED = 2, 1
ROWS = [
    Column("output_tokens_per_second", "output tokens/s"), Column("ttft_ms_p50", "TTFT p50, ms"),
    Column("ttft_ms_p95", "TTFT p95, ms"), Column("inter_token_ms_p50", "inter-token p50, ms"),
    Column("inter_token_ms_p95", "inter-token p95, ms"), Column("inter_token_ms_p99", "inter-token p99, ms"),
    Column("inter_token_ms_p100", "longest gap, ms"), Column("tpot_ms_p50", "TPOT p50, ms"),
    Column("tpot_ms_p95", "TPOT p95, ms"), Column("cpu_s", "CPU seconds for 1,000 tokens", 2),
]  # fmt: skip
ATTENTION = ("-fa off", "-fa on", "-fa on -ctk bf16 -ctv bf16", "-fa on -ctk q8_0 -ctv q8_0")
NGRAM_DRAFTS = (
    "--spec-type ngram-simple",
    "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 16",
    "--spec-type ngram-map-k --spec-ngram-map-k-size-n 4 --spec-ngram-map-k-size-m 16",
    "--spec-type ngram-mod --spec-ngram-mod-n-match 8 --spec-ngram-mod-n-min 4 --spec-ngram-mod-n-max 16",
    "--spec-type ngram-cache",
)


@dataclass(frozen=True)
class Load:
    """The sizes of a load and of both servers."""

    n_requests: int = 48
    clients: int = 16
    sizes: str = "-np 16 -c 32768"
    ours: str = ""
    """More flags of `cppbatch serve`."""
    layouts: tuple[str, ...] = ("-kvu", "--no-kv-unified")
    """llama-server's, to try."""


LOADS = {
    **dict.fromkeys(("mixed", "fan-out", "shared-prefix"), Load()),
    "full-cells": Load(24, 24, "-np 24 -c 2048", "--kv-layout unified", ("-kvu",)),
    **{name: Load(max(16, 16 * text.rounds)) for name, text in TEXT_WORKLOADS.items()},
}


class Measurement:
    """One load, and the flags of both servers."""

    def __init__(self, args: argparse.Namespace, name: str, clients: int | None) -> None:
        self.args, self.name = args, name
        self.load = replace(LOADS[name], clients=clients) if clients else LOADS[name]
        self.n_requests: int = args.requests or self.load.n_requests
        self.model = choose_model(args.model)

    def figures(self, url: str, seed: int, n_requests: int | None = None) -> Figures:
        """Puts the load on one server. Raises `UnusableServer`."""
        args, n = self.args, n_requests or self.n_requests
        kind, more = self.name, dict[str, Any](prefix_seed=PREFIX_SEED if args.same_prefix else None)
        if kind == "full-cells":
            kind, more = "fixed", {"prompt_tokens": Lengths(64, 64)}
        workload, left_s = make_load(args, kind, n, **more), args.end - time.monotonic()
        return measure_server(url, workload, seed=seed, concurrency=self.load.clients, timeout=left_s)

    def compare(self) -> None:
        """Prints the figures of both servers and the medians of the turns' ratios."""
        flags, args = self.best_flags(), self.args
        print(f"Kept: `{flags}`\n", flush=True)
        ours = serve_command(self.model, *self.load.sizes.split(), *self.load.ours.split(), *args.ours.split())
        with running_servers({OURS: ours, THEIRS: self.their_command(flags)}) as servers:

            def measure(name: str, turn: int) -> Figures:
                before = cpu_seconds(servers[name].process.pid)
                figures = self.figures(servers[name].url, turn + FIND_TURNS)
                tokens = (figures["output_tokens_per_second"] or 0.0) * (figures["seconds"] or 0.0)
                used = cpu_seconds(servers[name].process.pid) - before
                return {**figures, "cpu_s": 1000 * used / tokens if tokens else None}

            found = Comparison([OURS, THEIRS]).measure(args.turns, measure, uncounted=int(args.same_prefix))
        print(
            f"{self.model.stem}; {self.n_requests} requests, {self.load.clients} at once, medians of {args.turns} "
            "turns:\n"
        )
        rows = [[f"{self.name}: {title}", *cells] for title, *cells in found.side_by_side(ROWS, OURS, THEIRS)]
        totals = [[sum(v or 0 for v in found.values(n, k)) for k in ("failed", "requests")] for n in found.names]
        rows.append([f"{self.name}: failed requests", *(f"{a:.0f} of {b:.0f}" for a, b in totals), ""])
        print(markdown_table(["", OURS, THEIRS, "ratio (range)"], rows), end="\n\n", flush=True)

    def their_command(self, flags: str) -> list[str | Path]:
        common = ["-t", str(self.args.threads), "--cache-ram", "0", "--no-ui"]
        return [self.args.llama_server, "-m", self.model, *self.load.sizes.split(), *common, *flags.split()]

    def best_flags(self) -> str:
        """Finds llama-server's fastest layout and attention, then, for texts, its fastest drafts with them."""
        best: str = self.args.theirs or max_of(
            self.speeds([f"{layout} {attention}" for layout in self.load.layouts for attention in ATTENTION])
        )
        if self.name in TEXT_WORKLOADS and "--spec-type" not in best:
            best = max_of(self.speeds([f"{best} {drafts}" for drafts in NGRAM_DRAFTS]))
        return best

    def speeds(self, tried: list[str]) -> dict[str, float]:
        n = max(self.load.clients, self.n_requests // 2)
        with running_servers({flags: self.their_command(flags) for flags in tried}) as servers:
            found = Comparison(tried).measure(FIND_TURNS, lambda name, t: self.figures(servers[name].url, t, n))
        speeds = {flags: found.median(flags, ROWS[0].key) or 0.0 for flags in tried}
        print(f"llama-server, tokens/s: {', '.join(f'`{f}` {speed:.0f}' for f, speed in speeds.items())}.", flush=True)
        return speeds


def max_of(speeds: dict[str, float]) -> str:
    return max(speeds, key=speeds.__getitem__)


def main() -> None:
    """Prints a table for each load."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("llama_server", type=Path, help="the program llama-server")
    usual = [name for name in LOADS if name not in TEXT_WORKLOADS]
    parser.add_argument("--load", type=words, default=usual, help=f"some of {', '.join(LOADS)} ({','.join(usual)})")
    parser.add_argument("--clients", type=numbers, default=[None], help="numbers of clients to measure each load with")
    parser.add_argument("--requests", type=int, help="in each turn (48; full-cells: 24; texts: 16, job: 48)")
    add_load_options(parser)
    parser.add_argument("--same-prefix", action="store_true", help="the same prefix in every turn of shared-prefix")
    parser.add_argument("-t", "--threads", type=int, default=available_threads(), help="llama-server's threads")
    parser.add_argument("--minutes", type=float, default=60, help="for everything (60)")
    parser.add_argument("--theirs", help='best flags, if known: --theirs="-kvu -fa on"; drafts are still tried')
    parser.add_argument("--ours", default="", help='more flags of cppbatch serve: --ours="-t 1"')
    args = parser.parse_args()
    if unknown := [name for name in args.load if name not in LOADS]:
        parser.error(f"--load {','.join(unknown)}: write some of {', '.join(LOADS)}")
    args.end = time.monotonic() + 60 * args.minutes
    try:
        for name in args.load:
            for clients in args.clients:
                Measurement(args, name, clients).compare()
    except CppBatchError as error:
        sys.exit(f"bench_llama_server.py: {error}")


if __name__ == "__main__":
    main()
