#!/usr/bin/env python3
"""What `--prefix-cache-disk` gains after a restart, and what writing costs.

Restart: a server computes a long prompt, is killed when the prefix is on disk, and is started again: seconds to the
first token of the first request, without the folder and with it, and whether the texts are equal (with float weights
they must be). `--cold` empties the page cache of the files first.

Load: clients send distinct prompts to a server without the folder and to one with it, alternately: tokens/s.

    .venv/bin/python scripts/bench_prefix_disk.py [-m model.gguf] [--tokens 6000] [--repeats 3] [--cold]
    .venv/bin/python scripts/bench_prefix_disk.py --load [-m model.gguf] [--tokens 600] [--turns 6] [--requests 32]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from cppbatch.bench.report import markdown_table
from cppbatch.models.pull import choose_model
from cppbatch.sizing.child_process import running_server

N_NEW, N_CLIENTS, TIMEOUT_S = 32, 8, 120
WRITTEN_S = 30.0
DOCS = Path(__file__).parent.parent / "docs"
QUESTIONS = (
    "In short:",
    "The page above describes a server. Its purpose is",
    "To start the server with two models, one writes",
    "A request that waits longer than its timeout",
    "The most important sentence of the text above is this one:",
)


class Answer(NamedTuple):
    """Of one request."""

    first_token_s: float
    text: str
    cached_tokens: int


def post(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def ask(url: str, prompt: list[int], n_new: int = N_NEW) -> Answer:
    """One greedy completion."""
    body = {"prompt": prompt, "max_tokens": n_new, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first, text, cached = time.perf_counter(), 0.0, "", 0
    for event in post(url, body | {"stream_options": {"include_usage": True}}):
        for choice in event["choices"]:
            first = first or time.perf_counter() - began
            text += choice["text"]
        if event.get("usage"):
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(first, text, cached)


def stats(url: str) -> dict[str, Any]:
    """What the engine counts."""
    with urllib.request.urlopen(f"{url}/stats", timeout=TIMEOUT_S) as answer:
        return dict(json.load(answer))


def wait_until_written(url: str) -> int:
    """Waits until nothing more is written, and returns the bytes written so far."""
    end, written, since = time.monotonic() + WRITTEN_S, -1, 0.0
    while time.monotonic() < end:
        now = stats(url)["prefix_disk_written_bytes"]
        if now != written:
            written, since = now, time.monotonic()
        elif time.monotonic() - since > 1.0:
            break
        time.sleep(0.1)
    return written


def prompt_of(seed: int, n: int) -> list[int]:
    """Random token ids that every vocabulary has: the speed does not depend on the text."""
    rng = Random(seed)
    return [rng.randrange(20, 500) for _ in range(n)]


def tokens_of(url: str, text: str) -> list[int]:
    """The tokens of a text."""
    request = urllib.request.Request(f"{url}/tokenize", json.dumps({"content": text}).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return list(json.load(answer)["tokens"])


def english(url: str, n: int) -> list[int]:
    """The first tokens of the documentation: in random text the most likely tokens are nearly tied."""
    text = "\n\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    return tokens_of(url, text[: 8 * n])[:n]


def server_command(args: argparse.Namespace, folder: Path | None) -> list[str | Path]:
    """`cppbatch serve`; with a folder, with prefixes on disk."""
    command: list[str | Path] = [sys.executable, "-m", "cppbatch", "serve", "-m", choose_model(args.model)]
    return [*command, *args.serve.split(), *(["--prefix-cache-disk", folder] if folder else [])]


def empty_page_cache(folder: Path) -> None:
    """The next read of these files comes from the disk."""
    for path in folder.glob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_restart(args: argparse.Namespace, folder: Path) -> None:
    """Prints the seconds to the first token of each start, and their medians."""
    with running_server(server_command(args, folder)) as server:
        system = english(server.url, args.tokens)
        questions = [tokens_of(server.url, f"\n\n{question}") for question in QUESTIONS]
        ask(server.url, [*system, *questions[0]])
        written = wait_until_written(server.url)
    print(f"{written / 1e6:.0f} MB written, {written / args.tokens / 1000:.1f} KB a token", file=sys.stderr)
    times: dict[str, list[float]] = {"without": [], "with": []}
    rows, n_equal = [], 0
    for turn in range(args.repeats):
        prompt = [*system, *questions[1 + turn % (len(questions) - 1)]]
        texts = []
        for name, seconds in times.items():
            if args.cold:
                empty_page_cache(folder)
            with running_server(server_command(args, folder if name == "with" else None)) as server:
                answer = ask(server.url, prompt)
            seconds.append(answer.first_token_s)
            texts.append(answer.text)
            print(f"{name}: {answer.first_token_s:.3f} s, {answer.cached_tokens} cached", file=sys.stderr, flush=True)
        n_equal += texts[0] == texts[1]
    usual = median(times["without"])
    for name, seconds in times.items():
        rows.append([name, f"{median(seconds):.3f}", f"{usual / median(seconds):.1f}"])
    print(markdown_table(["prefix on disk", "first token, s", "times as fast"], rows))
    print(f"equal texts: {n_equal} of {args.repeats}")


def measure_load(args: argparse.Namespace, folder: Path) -> None:
    """Prints tokens/s with and without the folder, and the median of the turns' ratios."""
    seeds = iter(range(1, 1_000_000))
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    with (
        running_server(server_command(args, None)) as without,
        running_server(server_command(args, folder)) as beside,
        ThreadPoolExecutor(N_CLIENTS) as clients,
    ):

        def run(url: str, n: int) -> float:
            prompts = [prompt_of(next(seeds), args.tokens) for _ in range(n)]
            began = time.perf_counter()
            list(clients.map(lambda prompt: ask(url, prompt, 64), prompts))
            n_tokens: int = n * (args.tokens + 64)
            return n_tokens / (time.perf_counter() - began)

        urls = {"without": without.url, "with": beside.url}
        for url in urls.values():
            run(url, N_CLIENTS)
        wait_until_written(beside.url)
        for turn in range(args.turns):
            for name in list(urls)[:: -1 if turn % 2 else 1]:
                speeds[name].append(run(urls[name], args.requests))
                written = wait_until_written(beside.url)
            pair = [speeds[name][-1] for name in speeds]
            print(f"turn {turn + 1}: {pair[0]:.0f}, {pair[1]:.0f} tokens/s", file=sys.stderr, flush=True)
    ratio = median(b / a for a, b in zip(speeds["without"], speeds["with"], strict=True))
    rows = [[name, f"{median(values):.0f}"] for name, values in speeds.items()]
    print(markdown_table(["prefixes on disk", "prompt and new tokens/s"], rows))
    print(f"ratio, median of the turns: {ratio:.3f}; {written / 1e6:.0f} MB written")


def main() -> None:
    """Measures in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="a GGUF file; the default model unless given")
    parser.add_argument("--tokens", type=int, help="of a prompt; 6000, or 600 with --load")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="empty the page cache of the files before each start")
    parser.add_argument("--load", action="store_true", help="measure what writing costs")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--requests", type=int, default=32, help="of a turn")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument(
        "--serve", default="-c 8192 -np 8 --spec off -fa off", help="more arguments of `cppbatch serve`"
    )
    args = parser.parse_args()
    args.tokens = args.tokens or (600 if args.load else 6000)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        (measure_load if args.load else measure_restart)(args, Path(folder) / "prefixes")


if __name__ == "__main__":
    main()
