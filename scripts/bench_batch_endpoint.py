#!/usr/bin/env python3
"""/generate/batch beside single /generate requests: one after the other, and at the same time.

Starts `cppbatch serve` with its defaults. For each number of prompts the three ways take turns on new prompts, so that
the prefix cache has no effect. Prints a table of medians, and then checks that one invalid prompt of 64 fails alone.

.venv/bin/python scripts/bench_batch_endpoint.py [--prompts 1,3,8,16,64] [--repeats 3] [-- -m model.gguf]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any

from cppbatch.sizing.child_process import running_server

N_PROMPTS = 64
TOPICS = ["the sea", "a fox", "two brothers", "winter", "an old clock", "the moon", "a baker", "the first train"]
NUMBERS = itertools.count(1)


def prompts(n: int) -> list[str]:
    """Returns new prompts of one sentence each. They differ from the first word on."""
    return [f"{next(NUMBERS)} short stories about {TOPICS[i % len(TOPICS)]}. The first one:" for i in range(n)]


def post(url: str, path: str, body: object) -> Any:
    """Posts JSON and returns the decoded answer."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


class Ways:
    """The ways to ask for the same number of texts."""

    def __init__(self, url: str, n_tokens: int) -> None:
        self.url, self.n_tokens = url, n_tokens
        self.fields = {"max_tokens": n_tokens, "ignore_eos": True, "temperature": 0}

    def single(self, prompt: str) -> None:
        """Asks for one text."""
        assert post(self.url, "/generate", {**self.fields, "prompt": prompt})["completion_tokens"] == self.n_tokens

    def one_by_one(self, n: int) -> None:
        """Sends each request when the one before has its answer."""
        for prompt in prompts(n):
            self.single(prompt)

    def at_once(self, n: int) -> None:
        """Sends all requests at the same time."""
        with ThreadPoolExecutor(n) as clients:
            list(clients.map(self.single, prompts(n)))

    def batch(self, n: int) -> None:
        """Sends one request with all prompts."""
        answer = post(self.url, "/generate/batch", {**self.fields, "prompts": prompts(n)})
        assert [result["completion_tokens"] for result in answer["results"]] == [self.n_tokens] * n


def seconds(way: Callable[[int], None], n: int) -> float:
    """Returns how long it takes."""
    began = perf_counter()
    way(n)
    return perf_counter() - began


def one_invalid(url: str) -> list[dict[str, Any]]:
    """Sends 64 prompts, one of them longer than the context. Returns the results that are errors."""
    items = prompts(N_PROMPTS)
    items[13] = "x " * 200_000
    results = post(url, "/generate/batch", {"max_tokens": 8, "prompts": items})["results"]
    assert len(results) == N_PROMPTS
    return [result for result in results if "error" in result]


def main() -> None:
    """Prints the table, and the error of the invalid prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="1,3,8,16,64", help="numbers of prompts")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    options = parser.parse_args()
    with running_server([sys.executable, "-m", "cppbatch", "serve", *options.rest]) as server:
        ways = Ways(server.url, options.tokens)
        ways.batch(4)  # warm-up
        print("| prompts | one by one, tokens/s | at the same time | `/generate/batch` | batch / one by one |")
        print("|---|---|---|---|---|", flush=True)
        for n in map(int, options.prompts.split(",")):
            turns = [
                [seconds(way, n) for way in (ways.one_by_one, ways.at_once, ways.batch)] for _ in range(options.repeats)
            ]
            rates = [n * options.tokens / median(way) for way in zip(*turns, strict=True)]
            gain = median(alone / batch for alone, _, batch in turns)
            print(f"| {n} | {' | '.join(f'{rate:.0f}' for rate in rates)} | {gain:.2f} |", flush=True)
        for failed in one_invalid(server.url):
            print(f"of {N_PROMPTS} prompts this one failed: {failed['index']} ({failed['error']['message'][:60]}...)")


if __name__ == "__main__":
    main()
