#!/usr/bin/env python3
"""What a sleeping server needs and how long it takes to wake: memory of all its processes, and time to first token.

.venv/bin/python scripts/bench_sleep.py -m model.gguf [--repeats 5] [-- more arguments for `cppbatch serve`]

The client is `openai`. Each round measures an answer, waits until the server sleeps, and sends the same request again.
Memory is PSS: pages that processes share count once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from statistics import median

import openai
import psutil

from cppbatch.sizing.child_process import RunningServer, running_server

TIMEOUT_S = 120
MIB = 2**20
WORKERS = "cppbatch.cluster.worker.main"


class Server:
    """A server that runs."""

    def __init__(self, running: RunningServer) -> None:
        self.url, self._process = running
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def _status(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=TIMEOUT_S) as answer:
                return str(json.load(answer)["status"])
        except OSError:
            return "not there"

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` returns true."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > end or self._process.wait(0) is not None:
                raise SystemExit(f"the server is {self._status()} after {TIMEOUT_S} s")
            time.sleep(0.02)

    def wait_for_sleep(self) -> None:
        """Waits until it reports that it sleeps and only its own process is left."""
        self.wait_for(lambda: self._status() == "sleeping" and len(self._tree()) == 1)

    def _tree(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def memory(self) -> float:
        """MiB of the server's process and its workers."""
        tree = [each for i, each in enumerate(self._tree()) if i == 0 or WORKERS in each.cmdline()]
        return sum(int(each.memory_full_info().pss) for each in tree) / MIB

    def first_token(self) -> tuple[float, str]:
        """The seconds until the first token of an answer, and its text."""
        began = time.perf_counter()
        stream = self.client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            max_tokens=16,
            temperature=0,
            stream=True,
            extra_body={"cache_prompt": False},
        )
        seconds, text = 0.0, ""
        for chunk in stream:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                seconds = seconds or time.perf_counter() - began
                text += piece
        return seconds, text


@contextlib.contextmanager
def sleeping_server(arguments: list[str], idle: float) -> Iterator[Server]:
    """`cppbatch serve` that sleeps after `idle` seconds without a request."""
    with tempfile.TemporaryDirectory() as data:
        flags = ["--sleep-idle-seconds", str(idle), "--data-dir", data]
        with running_server([sys.executable, "-m", "cppbatch", "serve", *flags, *arguments], TIMEOUT_S) as running:
            yield Server(running)


def main() -> None:
    """Prints a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--idle", type=float, default=3.0)
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    options = parser.parse_args()
    before, asleep, after, awake_s, wake_s, texts = [], [], [], [], [], set()
    with sleeping_server(["-m", options.model, *options.rest], options.idle) as server:
        server.first_token()
        for _ in range(options.repeats):
            seconds, text = server.first_token()
            awake_s.append(seconds)
            before.append(server.memory())
            server.wait_for_sleep()
            asleep.append(server.memory())
            seconds, woken_text = server.first_token()
            wake_s.append(seconds)
            after.append(server.memory())
            texts |= {text, woken_text}
    for name, values, unit in (
        ("memory before", before, "MiB"),
        ("memory asleep", asleep, "MiB"),
        ("memory after", after, "MiB"),
        ("first token, awake", awake_s, "s"),
        ("first token, asleep", wake_s, "s"),
    ):
        digits = 0 if unit == "MiB" else 3
        low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
        print(f"| {name} | {middle} {unit} | {low} to {high} |")
    print(f"{len(texts)} different texts")


if __name__ == "__main__":
    main()
