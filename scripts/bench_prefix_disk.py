#!/usr/bin/env python3
"""Measures what `--prefix-cache-disk` gains after a restart: seconds to the first token, with and without it.

A server computes a long prompt of English, is killed when the prefix is on disk, and starts again in each turn. The
texts with and without are compared: with float weights they are equal. --cold empties the page cache of the files
before each start. `scripts/bench_servers.py` measures what writing costs under load.

    .venv/bin/python scripts/bench_prefix_disk.py [-m model.gguf] [--tokens 6000] [--repeats 3] [--cold]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from measuring import Comparison, Figures, script_arguments
from server_process import get_json, post_json, running_server, serve_command

from cppbatch.bench.load.client import LoadClient, RequestOutcome, TargetServer
from cppbatch.bench.load.workload import LoadRequest
from cppbatch.bench.report import Column
from cppbatch.models.pull import choose_model

N_NEW, TIMEOUT_S, WRITTEN_S = 32, 120, 30.0
DOCS = Path(__file__).parent.parent / "docs"
QUESTIONS = (
    "In short:",
    "The page above describes a server. Its purpose is",
    "To start the server with two models, one writes",
    "A request that waits longer than its timeout",
    "The most important sentence of the text above is this one:",
)


def ask(url: str, prompt: list[int]) -> RequestOutcome:
    """Sends one greedy completion. Raises `RequestFailure`."""

    async def send() -> RequestOutcome:
        async with LoadClient(TargetServer(label="server", url=url, model=""), TIMEOUT_S) as client:
            return await client.send(LoadRequest(prompt, N_NEW), time.perf_counter())

    outcome = asyncio.run(send())
    if outcome.failure:
        raise outcome.failure
    return outcome


def tokens_of(url: str, text: str) -> list[int]:
    return list(post_json(f"{url}/tokenize", {"content": text})["tokens"])


def wait_until_written(url: str) -> int:
    """Waits until nothing more is written, and returns the bytes written so far."""
    end, written, since = time.monotonic() + WRITTEN_S, -1, 0.0
    while (time.monotonic() < end and time.monotonic() - since < 1.0) or written < 0:
        if (now := get_json(f"{url}/stats")["prefix_disk_written_bytes"]) != written:
            written, since = now, time.monotonic()
        time.sleep(0.1)
    return written


def empty_page_cache(folder: Path) -> None:
    """Lets the next read of these files come from the disk."""
    for path in folder.glob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_restart(args: argparse.Namespace, folder: Path) -> None:
    """Prints the medians of both, their ratio, and how many texts are equal."""
    plain = serve_command(choose_model(args.model), *args.serve.split())
    commands = {"without": plain, "with": [*plain, "--prefix-cache-disk", str(folder)]}
    with running_server(commands["with"]) as server:
        # Not random text, in which the most likely tokens are nearly tied.
        text = "\n\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
        system = tokens_of(server.url, text[: 8 * args.tokens])[: args.tokens]
        questions = [tokens_of(server.url, f"\n\n{question}") for question in QUESTIONS]
        ask(server.url, [*system, *questions[0]])
        written = wait_until_written(server.url)
    print(f"{written / 1e6:.0f} MB written, {written / args.tokens / 1000:.1f} KB a token", file=sys.stderr)
    texts: dict[str, list[str]] = {name: [] for name in commands}

    def measure(name: str, turn: int) -> Figures:
        if args.cold:
            empty_page_cache(folder)
        with running_server(commands[name]) as server:
            answer = ask(server.url, [*system, *questions[1 + turn % (len(questions) - 1)]])
        texts[name].append(answer.text)
        return {"first_token": answer.time_to_first_token, "cached": answer.cached_tokens}

    found = Comparison(commands).measure(args.turns, measure)
    columns = [Column("first_token", "first token, s", 3), Column("cached", "cached tokens", 0)]
    print(found.table(columns, {"first_token": "times the seconds"}))
    n_equal = sum(one == other for one, other in zip(*texts.values(), strict=True))
    print(f"equal texts: {n_equal} of {args.turns}")


def main() -> None:
    """Measures in a temporary folder."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("--tokens", type=int, default=6000, help="of the prompt (6000)")
    parser.add_argument("--cold", action="store_true", help="empty the page cache of the files before each start")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--serve", default="-c 8192 -np 8 --spec off -fa off", help="more arguments of `serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure_restart(args, Path(folder) / "prefixes")


if __name__ == "__main__":
    main()
