#!/usr/bin/env python3
"""Compares /generate/batch with single /generate requests, one after the other and at the same time, alternately.

For each number of prompts the ways have new prompts in each turn, so that the prefix cache has no effect. Then it
checks that one invalid prompt of 64 fails alone.

    .venv/bin/python scripts/bench_batch_endpoint.py [--prompts 1,3,8,16,64] [--repeats 3] [-- -m model.gguf]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

from measuring import Comparison, Figures, cell, markdown_table, numbers, ratio_cell, script_arguments
from server_process import post_json, running_server

N_PROMPTS = 64
ONE_BY_ONE, AT_ONCE, BATCH = "one by one", "at the same time", "`/generate/batch`"
TOPICS = ["the sea", "a fox", "two brothers", "winter", "an old clock", "the moon", "a baker", "the first train"]
NUMBERS = itertools.count(1)


def prompts(n: int) -> list[str]:
    """Returns new prompts of one sentence each, which differ from the first word on."""
    return [f"{next(NUMBERS)} short stories about {TOPICS[i % len(TOPICS)]}. The first one:" for i in range(n)]


def ways(url: str, n_tokens: int) -> dict[str, Callable[[list[str]], object]]:
    """Returns the ways to ask for texts."""
    fields = {"max_tokens": n_tokens, "ignore_eos": True, "temperature": 0}

    def single(prompt: str) -> None:
        assert post_json(f"{url}/generate", fields | {"prompt": prompt})["completion_tokens"] == n_tokens

    def at_once(items: list[str]) -> None:
        with ThreadPoolExecutor(len(items)) as clients:
            list(clients.map(single, items))

    def batch(items: list[str]) -> None:
        results = post_json(f"{url}/generate/batch", fields | {"prompts": items})["results"]
        assert [result["completion_tokens"] for result in results] == [n_tokens] * len(items)

    return {ONE_BY_ONE: lambda items: list(map(single, items)), AT_ONCE: at_once, BATCH: batch}


def one_invalid(url: str) -> list[dict[str, Any]]:
    """Sends 64 prompts, one of them longer than the context. Returns the results that are errors."""
    items = prompts(N_PROMPTS)
    items[13] = "x " * 200_000
    results = post_json(f"{url}/generate/batch", {"max_tokens": 8, "prompts": items})["results"]
    assert len(results) == N_PROMPTS
    return [result for result in results if "error" in result]


def main() -> None:
    """Prints the table, and the error of the invalid prompt."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("--prompts", type=numbers, default=[1, 3, 8, 16, 64], help="numbers of prompts")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    args = parser.parse_args()
    with running_server([sys.executable, "-m", "cppbatch", "serve", *args.rest]) as server:
        each_way = ways(server.url, args.tokens)
        each_way[BATCH](prompts(4))  # warm-up
        rows = []
        for n in args.prompts:

            def measure(way: str, turn: int) -> Figures:
                began = perf_counter()
                each_way[way](prompts(n))  # noqa: B023
                return {"tokens_per_second": n * args.tokens / (perf_counter() - began)}  # noqa: B023

            found = Comparison(each_way).measure(args.turns, measure)
            speeds = [cell(found.median(way, "tokens_per_second"), 0) for way in each_way]
            rows.append([str(n), *speeds, ratio_cell(found.ratio("tokens_per_second", BATCH, ONE_BY_ONE))])
        print(markdown_table(["prompts", *(f"{way}, tokens/s" for way in each_way), "batch / one by one"], rows))
        for failed in one_invalid(server.url):
            print(f"of {N_PROMPTS} prompts this one failed: {failed['index']} ({failed['error']['message'][:60]}...)")


if __name__ == "__main__":
    main()
