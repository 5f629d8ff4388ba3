#!/usr/bin/env python3
"""Speedup of /generate/batch: 64 short prompts in one request against 64 sequential /generate requests.

Starts `cppbatch serve` with its defaults, prints the median of the repeats' ratios, and then checks that one invalid
prompt of 64 fails alone. Every run has new prompts, so that the prefix cache has no effect.

.venv/bin/python scripts/bench_batch_endpoint.py [--repeats 3] [-- -m model.gguf]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import urllib.request
from statistics import median
from time import perf_counter
from typing import Any

from cppbatch.bench.child_process import running_server

N_PROMPTS, N_TOKENS = 64, 32
FIELDS = {"max_tokens": N_TOKENS, "ignore_eos": True, "temperature": 0}
TOPICS = ["the sea", "a fox", "two brothers", "winter", "an old clock", "the moon", "a baker", "the first train"]
NUMBERS = itertools.count(1)


def prompts() -> list[str]:
    """Returns new prompts of one sentence each. They differ from the first word on."""
    return [f"{next(NUMBERS)} short stories about {TOPICS[i % len(TOPICS)]}. The first one:" for i in range(N_PROMPTS)]


def post(url: str, path: str, body: object) -> Any:
    """Posts JSON and returns the decoded answer."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def one_by_one(url: str) -> float:
    """Returns the seconds of sequential requests."""
    began = perf_counter()
    for prompt in prompts():
        assert post(url, "/generate", {**FIELDS, "prompt": prompt})["completion_tokens"] == N_TOKENS
    return perf_counter() - began


def all_at_once(url: str) -> float:
    """Returns the seconds of one batch request."""
    began = perf_counter()
    answer = post(url, "/generate/batch", {**FIELDS, "prompts": prompts()})
    assert [result["completion_tokens"] for result in answer["results"]] == [N_TOKENS] * N_PROMPTS
    return perf_counter() - began


def one_invalid(url: str) -> list[dict[str, Any]]:
    """Sends 64 prompts, one of them longer than the context. Returns the results that are errors."""
    items = prompts()
    items[13] = "x " * 200_000
    results = post(url, "/generate/batch", {**FIELDS, "prompts": items})["results"]
    assert len(results) == N_PROMPTS
    return [result for result in results if "error" in result]


def main() -> None:
    """Prints both medians, their ratio, and the error of the invalid prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    options = parser.parse_args()
    with running_server([sys.executable, "-m", "cppbatch", "serve", *options.rest]) as server:
        url = server.url
        post(url, "/generate/batch", {**FIELDS, "prompts": prompts()[:16]})  # warm-up
        sequential, batched = [], []
        for _ in range(options.repeats):
            batched.append(all_at_once(url))
            sequential.append(one_by_one(url))
            print(f"one by one {sequential[-1]:6.2f} s   /generate/batch {batched[-1]:6.2f} s", flush=True)
        one, many = median(sequential), median(batched)
        ratio = median(a / b for a, b in zip(sequential, batched, strict=True))
        print(f"medians: {one:.2f} s and {many:.2f} s: /generate/batch is {ratio:.2f} times as fast")
        for failed in one_invalid(url):
            print(f"of {N_PROMPTS} prompts this one failed: {failed['index']} ({failed['error']['message'][:60]}...)")


if __name__ == "__main__":
    main()
