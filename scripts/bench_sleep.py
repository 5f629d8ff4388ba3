#!/usr/bin/env python3
"""Measures a sleeping server: memory of all its processes, and the time to first token when it wakes.

.venv/bin/python scripts/bench_sleep.py -m model.gguf [--repeats 5] [-- more arguments for `cppbatch serve`]

The client is `openai`. Each round measures an answer, waits until the server sleeps, and sends the same request again.
Memory is PSS: pages that processes share count once.
"""

from __future__ import annotations

import tempfile
import time

import openai
import psutil
from measuring import markdown_table, script_arguments
from server_process import RunningServer, get_json, running_server, serve_command

from cppbatch.bench.report import Spread
from cppbatch.models.pull import choose_model

TIMEOUT_S = 120
WORKERS = "cppbatch.cluster.worker.main"
ROWS = {
    "memory before": ("MiB", 0), "memory asleep": ("MiB", 0), "memory after": ("MiB", 0),
    "first token, awake": ("s", 3), "first token, asleep": ("s", 3),
}  # fmt: skip


def processes(server: RunningServer) -> list[psutil.Process]:
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def wait_for_sleep(server: RunningServer) -> None:
    """Waits until it reports that it sleeps and only its own process is left."""
    end = time.monotonic() + TIMEOUT_S
    while (status := get_json(f"{server.url}/health")["status"]) != "sleeping" or len(processes(server)) > 1:
        if time.monotonic() > end:
            raise SystemExit(f"the server is {status} after {TIMEOUT_S} s")
        time.sleep(0.02)


def memory(server: RunningServer) -> float:
    """Returns MiB of the server's process and its workers."""
    tree = [each for i, each in enumerate(processes(server)) if i == 0 or WORKERS in each.cmdline()]
    return sum(int(each.memory_full_info().pss) for each in tree) / 2**20


def first_token(server: RunningServer) -> tuple[float, str]:
    """Returns the seconds until the first token of an answer, and its text."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
    began, seconds, text = time.perf_counter(), 0.0, ""
    stream = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=16, temperature=0,
        stream=True, extra_body={"cache_prompt": False},
    )  # fmt: skip
    for chunk in stream:
        if piece := chunk.choices[0].delta.content if chunk.choices else None:
            seconds = seconds or time.perf_counter() - began
            text += piece
    return seconds, text


def main() -> None:
    """Prints a table of medians."""
    parser = script_arguments(__doc__, turns=5)
    parser.add_argument("--idle", type=float, default=3.0, help="seconds until the server sleeps (3)")
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    args = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as data:
        flags = ["--sleep-idle-seconds", args.idle, "--data-dir", data, *args.rest]
        with running_server(serve_command(choose_model(args.model), *flags), TIMEOUT_S) as server:
            first_token(server)
            texts = set()
            for _ in range(args.turns):
                awake_s, text = first_token(server)
                before = memory(server)
                wait_for_sleep(server)
                asleep = memory(server)
                wake_s, woken_text = first_token(server)
                for name, value in zip(ROWS, (before, asleep, memory(server), awake_s, wake_s), strict=True):
                    found[name].append(value)
                texts |= {text, woken_text}
    rows = []
    for name, (unit, digits) in ROWS.items():
        spread = Spread.of(found[name])
        low, middle, high = (f"{value:,.{digits}f}" for value in (spread.low, spread.median, spread.high))
        rows.append([name, f"{middle} {unit}", f"{low} to {high}"])
    print(markdown_table(["", "median", "from, to"], rows))
    print(f"{len(texts)} different texts")


if __name__ == "__main__":
    main()
