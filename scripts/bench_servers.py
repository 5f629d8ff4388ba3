#!/usr/bin/env python3
"""Compares running servers under the same load, alternately: cppbatch serve with other settings, and llama-server.

    .venv/bin/python scripts/bench_servers.py PEERS/llama-server [-m model.gguf] [--load mixed,fan-out] [--turns 3]
    .venv/bin/python scripts/bench_servers.py alone@1="--no-prefix-cache" shared@16="" --load fan-out
    .venv/bin/python scripts/bench_servers.py drafts="" off="--spec off" PEERS/llama-server

NAME[@CLIENTS]=FLAGS is a `cppbatch serve` with these flags; without one, it has its defaults. The load is that of
`cppbatch bench serve`. Ratios are to llama-server, or to the first server.

For each load llama-server first runs with unified cells and with a stream for each sequence, with and without flash
attention and with smaller cache types, and the fastest flags are kept; for the loads of speculative decoding (quote,
json, code, job, free) its kinds of n-gram drafts are tried as well. --same-prefix: all turns of shared-prefix have the
same prefix, and the first one, which computes it, is not counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from measuring import Comparison, Figures, markdown_table, numbers, script_arguments, words
from server_process import cpu_seconds, get_json, running_servers, serve_command

from cppbatch.bench.load.compare_servers import compare_servers
from cppbatch.bench.load.target import Target
from cppbatch.bench.load.workload import PREFIX_TOKENS, LoadSettings, make_workload
from cppbatch.bench.prompts import Lengths
from cppbatch.bench.report import Column, Spread
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.config import available_threads
from cppbatch.errors import CppBatchError
from cppbatch.models.pull import choose_model

THEIRS = "llama-server"
FIND_TURNS, PREFIX_SEED = 2, 1
ROWS = [
    Column("output_tokens_per_second", "output tokens/s"), Column("ttft_ms_p50", "TTFT p50, ms"),
    Column("ttft_ms_p95", "TTFT p95, ms"), Column("inter_token_ms_p50", "inter-token p50, ms"),
    Column("inter_token_ms_p95", "inter-token p95, ms"), Column("inter_token_ms_p99", "inter-token p99, ms"),
    Column("inter_token_ms_p100", "longest gap, ms"), Column("tpot_ms_p50", "TPOT p50, ms"),
    Column("tpot_ms_p95", "TPOT p95, ms"), Column("cpu_s", "CPU seconds for 1,000 tokens", 2),
    Column("cells", "KV cells of running and finished requests", 0),
]  # fmt: skip
ATTENTION = ("-fa off", "-fa on", "-fa on -ctk bf16 -ctv bf16", "-fa on -ctk q8_0 -ctv q8_0")
NGRAM_DRAFTS = (
    "--spec-type ngram-simple",
    "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 16",
    "--spec-type ngram-map-k --spec-ngram-map-k-size-n 4 --spec-ngram-map-k-size-m 16",
    "--spec-type ngram-mod --spec-ngram-mod-n-match 8 --spec-ngram-mod-n-min 4 --spec-ngram-mod-n-max 16",
    "--spec-type ngram-cache",
)


class Setting(NamedTuple):
    """A `cppbatch serve`. `clients`: 0: as many as the load has."""

    name: str = "cppbatch"
    clients: int = 0
    flags: str = ""


@dataclass(frozen=True)
class Load:
    """The sizes of a load and of all servers."""

    n_requests: int = 48
    clients: int = 16
    sizes: str = "-np 16 -c 32768"
    ours: str = ""
    """More flags of `cppbatch serve`."""
    layouts: tuple[str, ...] = ("-kvu", "--no-kv-unified")
    """llama-server's, to try."""


LOADS = {
    **dict.fromkeys(("mixed", "fan-out", "shared-prefix", "fixed"), Load()),
    "full-cells": Load(24, 24, "-np 24 -c 2048", "--kv-layout unified", ("-kvu",)),
    **{name: Load(max(16, 16 * text.rounds)) for name, text in TEXT_WORKLOADS.items()},
}
USUAL = ["mixed", "fan-out", "shared-prefix", "full-cells"]


class Measurement:
    """One load, and the flags of the servers."""

    def __init__(self, args: argparse.Namespace, name: str, clients: int | None) -> None:
        self.args, self.name = args, name
        self.load = replace(LOADS[name], clients=clients) if clients else LOADS[name]
        self.n_requests: int = args.requests or self.load.n_requests
        self.model = choose_model(args.model)

    def figures(self, url: str, seed: int, n_requests: int | None = None, clients: int = 0) -> Figures:
        """Puts the load on one server. Raises `UnusableServer`."""
        args, kind, sizes = self.args, self.name, dict[str, Any]()
        if kind == "full-cells":
            kind, sizes = "fixed", {"prompt_tokens": Lengths(64, 64)}
        elif args.same_prefix:
            sizes = {"prefix_seed": PREFIX_SEED}
        given = {key: getattr(args, key) for key in ("prompt_tokens", "output_tokens", "prefix_tokens")}
        workload = make_workload(kind, n_requests or self.n_requests, **given | sizes)
        load = LoadSettings(
            workload=workload, concurrency=clients or self.load.clients, warmup=0, seed=seed, repeats=1,
            endpoint="chat" if kind in TEXT_WORKLOADS else "completions", timeout=args.end - time.monotonic(),
        )  # fmt: skip
        (row,) = compare_servers([Target("server", url)], load, lambda *progress: None).rows
        figures = {key: value.median if isinstance(value, Spread) else value for key, value in row.items()}
        return {key: value for key, value in figures.items() if value is None or isinstance(value, (int, float))}

    def compare(self) -> None:
        """Prints the figures of all servers and the medians of the turns' ratios."""
        args, commands = self.args, dict[str, list[str | Path]]()
        settings: dict[str, Setting] = {each.name: each for each in args.settings}
        for name, setting in settings.items():
            flags = f"{self.load.sizes} {self.load.ours} {args.ours} {setting.flags}"
            commands[name] = [*serve_command(self.model, *flags.split())]
        if args.llama_server:
            flags = self.best_flags()
            print(f"Kept: `{flags}`\n", flush=True)
            commands[THEIRS] = self.their_command(flags)
        with running_servers(commands) as servers:

            def measure(name: str, turn: int) -> Figures:
                url, pid, setting = servers[name].url, servers[name].process.pid, settings.get(name)
                before = cpu_seconds(pid)
                figures = self.figures(url, turn + FIND_TURNS, clients=setting.clients if setting else 0)
                tokens = (figures["output_tokens_per_second"] or 0.0) * (figures["seconds"] or 0.0)
                used, stats = cpu_seconds(pid) - before, get_json(f"{url}/stats") if setting else None
                cells = stats and stats["kv_cells_used"] + stats["kv_cells_cached"]
                return {**figures, "cpu_s": 1000 * used / tokens if tokens else None, "cells": cells}

            uncounted = int(args.same_prefix or not args.llama_server)
            found = Comparison(commands).measure(args.turns, measure, uncounted=uncounted)
        print(f"{self.model.stem}; {self.n_requests} requests, {self.load.clients} at once, {args.turns} turns:\n")
        base = THEIRS if args.llama_server else found.names[0]
        pairs = [(name, base) for name in found.names if name != base]
        rows = [[f"{self.name}: {title}", *cells] for title, *cells in found.side_by_side(ROWS, pairs)]
        totals = [[sum(v or 0 for v in found.values(n, k)) for k in ("failed", "requests")] for n in found.names]
        failed = [f"{a:.0f} of {b:.0f}" for a, b in totals]
        rows.append([f"{self.name}: failed requests", *failed, *("" for _ in pairs)])
        ratios = [f"{name} / {base} (range)" for name, base in pairs]
        print(markdown_table(["", *found.names, *ratios], rows), end="\n\n", flush=True)

    def their_command(self, flags: str) -> list[str | Path]:
        common = ["-t", str(self.args.threads), "--cache-ram", "0", "--no-ui"]
        return [self.args.llama_server, "-m", self.model, *self.load.sizes.split(), *common, *flags.split()]

    def best_flags(self) -> str:
        """Finds llama-server's fastest layout and attention, then, for texts, its fastest drafts with them."""
        best: str = self.args.theirs or self.fastest(
            [f"{layout} {attention}" for layout in self.load.layouts for attention in ATTENTION]
        )
        if self.name in TEXT_WORKLOADS and "--spec-type" not in best:
            best = self.fastest([f"{best} {drafts}" for drafts in NGRAM_DRAFTS])
        return best

    def fastest(self, tried: list[str]) -> str:
        n = max(self.load.clients, self.n_requests // 2)
        with running_servers({flags: self.their_command(flags) for flags in tried}) as servers:
            found = Comparison(tried).measure(FIND_TURNS, lambda name, t: self.figures(servers[name].url, t, n))
        speeds = {flags: found.median(flags, ROWS[0].key) or 0.0 for flags in tried}
        print(f"llama-server, tokens/s: {', '.join(f'`{f}` {speed:.0f}' for f, speed in speeds.items())}.", flush=True)
        return max(speeds, key=speeds.__getitem__)


def server(given: str) -> Setting | Path:
    """Reads `NAME[@CLIENTS]=FLAGS`, or the path of llama-server."""
    name, equals, flags = given.partition("=")
    name, _, clients = name.partition("@")
    return Setting(name, int(clients or 0), flags) if equals else Path(given)


def main() -> None:
    """Prints a table for each load."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("servers", nargs="+", type=server, metavar="NAME[@CLIENTS]=FLAGS|LLAMA-SERVER")
    parser.add_argument("--load", type=words, default=USUAL, help=f"some of {', '.join(LOADS)} ({','.join(USUAL)})")
    parser.add_argument("--clients", type=numbers, default=[None], help="numbers of clients to measure each load with")
    parser.add_argument("--requests", type=int, help="in each turn (48; full-cells: 24; texts: 16, job: 48)")
    for what in ("prompt", "output"):
        parser.add_argument(f"--{what}-tokens", type=lambda n: Lengths(int(n), int(n)), help="(as the load says)")
    parser.add_argument("--prefix-tokens", type=int, default=PREFIX_TOKENS, help=f"of shared-prefix ({PREFIX_TOKENS})")
    parser.add_argument("--same-prefix", action="store_true", help="the same prefix in every turn of shared-prefix")
    parser.add_argument("-t", "--threads", type=int, default=available_threads(), help="llama-server's threads")
    parser.add_argument("--minutes", type=float, default=60, help="for everything (60)")
    parser.add_argument("--theirs", help='best flags, if known: --theirs="-kvu -fa on"; drafts are still tried')
    parser.add_argument("--ours", default="", help='more flags of each cppbatch serve: --ours="-t 1"')
    args = parser.parse_args()
    if unknown := [name for name in args.load if name not in LOADS]:
        parser.error(f"--load {','.join(unknown)}: write some of {', '.join(LOADS)}")
    args.settings = [each for each in args.servers if isinstance(each, Setting)] or [Setting()]
    args.llama_server = next((each for each in args.servers if isinstance(each, Path)), None)
    args.end = time.monotonic() + 60 * args.minutes
    try:
        for name in args.load:
            for clients in args.clients:
                Measurement(args, name, clients).compare()
    except CppBatchError as error:
        sys.exit(f"bench_servers.py: {error}")


if __name__ == "__main__":
    main()
