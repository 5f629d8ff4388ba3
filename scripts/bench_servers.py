#!/usr/bin/env python3
"""Compares settings of `cppbatch serve` under one load of `cppbatch bench serve`, alternately, on running servers.

    .venv/bin/python scripts/bench_servers.py plain="--no-prefix-cache" cached="" --load shared-prefix --turns 3
    .venv/bin/python scripts/bench_servers.py alone@1="--no-prefix-cache" shared@16="" --load fan-out --requests 16
    .venv/bin/python scripts/bench_servers.py without="" with="--prefix-cache-disk FOLDER" --load fixed

NAME[@CLIENTS]=FLAGS: the flags of `serve` and the number of clients (16). The last columns are ratios to the first one,
and the KV cells of running and finished requests after the last turn.
"""

from __future__ import annotations

from typing import NamedTuple

from measuring import Comparison, Figures, script_arguments
from server_process import (
    add_load_options,
    get_json,
    make_load,
    measure_server,
    running_servers,
    serve_command,
)  # fmt: skip

from cppbatch.bench.load.workload import SIZES
from cppbatch.bench.report import Column
from cppbatch.models.pull import choose_model

COLUMNS = [
    Column("output_tokens_per_second", "output tokens/s"), Column("ttft_ms_p50", "TTFT p50, ms", 0),
    Column("ttft_ms_p95", "p95", 0), Column("inter_token_ms_p50", "inter-token p50, ms", 0),
    Column("inter_token_ms_p95", "p95", 0), Column("failed", "failed", 0), Column("cells", "KV cells", 0),
]  # fmt: skip


class Setting(NamedTuple):
    """A server and its clients."""

    name: str
    clients: int
    flags: str


def setting(given: str) -> Setting:
    name, _, flags = given.partition("=")
    name, _, clients = name.partition("@")
    return Setting(name, int(clients or 16), flags)


def main() -> None:
    """Prints a row for each setting."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("settings", nargs="+", type=setting, metavar="NAME[@CLIENTS]=FLAGS")
    parser.add_argument("--load", choices=SIZES, default="mixed")
    parser.add_argument("--requests", type=int, default=48, help="of each turn (48)")
    add_load_options(parser)
    parser.add_argument("--serve", default="-np 16 -c 16384", help="flags of all servers (-np 16 -c 16384)")
    args = parser.parse_args()
    settings: dict[str, Setting] = {each.name: each for each in args.settings}
    workload = make_load(args, args.load, args.requests)
    model = choose_model(args.model)
    commands = {each.name: serve_command(model, *args.serve.split(), *each.flags.split()) for each in settings.values()}
    with running_servers(commands) as servers:

        def measure(name: str, turn: int) -> Figures:
            url = servers[name].url
            found = measure_server(url, workload, seed=turn, concurrency=settings[name].clients)
            stats = get_json(f"{url}/stats")
            return found | {"cells": stats["kv_cells_used"] + stats["kv_cells_cached"]}

        compared = Comparison(settings).measure(args.turns, measure, uncounted=1)
    print(f"{model.stem}; {workload}; requests: {args.requests}, medians of {args.turns} turns:\n")
    print(compared.table(COLUMNS, {COLUMNS[0].key: "times the tokens/s"}))


if __name__ == "__main__":
    main()
