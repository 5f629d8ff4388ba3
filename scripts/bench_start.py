#!/usr/bin/env python3
"""Seconds from the start of `cppbatch serve` to the first token of an answer, and llama-server beside it.

.venv/bin/python scripts/bench_start.py -m model.gguf [--turns 7] [--llama-server PATH] [-- more flags of serve]

Both servers start alternately, with the same number of sequences and KV cells. The first start of each is not counted:
it brings the files into the file cache, and finds out what is cached about the model.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from urllib.request import Request, urlopen

from measuring import Comparison, script_arguments
from server_process import ChildProcess, free_port, serve_command

from cppbatch.bench.report import Column
from cppbatch.config import EngineConfig, available_threads
from cppbatch.models.pull import choose_model

TIMEOUT_S = 120
BODY = json.dumps({"prompt": "Hello", "max_tokens": 4, "stream": True}).encode()


def first_token(command: list[str]) -> float:
    """Returns the seconds of one start. The client repeats its request until the server answers."""
    port = free_port()
    command = [*command, "--port", str(port)]
    began = time.perf_counter()
    with ChildProcess(command) as server:
        while time.perf_counter() - began < TIMEOUT_S and server.wait(0) is None:
            if answers(port):
                return time.perf_counter() - began
            time.sleep(0.01)
        raise SystemExit(f"no answer within {TIMEOUT_S} s; the command was: {' '.join(command)}")


def answers(port: int) -> bool:
    """Whether the server sends the first event of a stream."""
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    with contextlib.suppress(OSError), urlopen(Request(url, BODY, headers), timeout=TIMEOUT_S) as answer:
        return bool(answer.readline().startswith(b"data: {"))
    return False


def main() -> None:
    """Prints the medians of the starts, and their ratios."""
    parser = script_arguments(__doc__, turns=7)
    parser.add_argument("--llama-server", type=Path, help="the program of llama.cpp to start alternately with ours")
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    args = parser.parse_args()
    model = choose_model(args.model)
    config = EngineConfig(model_path=str(model))
    commands = {"cppbatch": serve_command(model, *args.rest)}
    if args.llama_server:
        sizes = ["-c", str(config.n_ctx), "-np", str(config.n_parallel), "-t", str(available_threads())]
        commands["llama-server"] = [str(args.llama_server), "-m", str(model), *sizes]
    found = Comparison(commands).measure(
        args.turns, lambda name, turn: {"start": first_token(commands[name])}, uncounted=1
    )
    ratios = {"start": "of llama-server's time"} if args.llama_server else {}
    print(found.table([Column("start", "start to first token, s", 2)], ratios, base=list(commands)[-1]))


if __name__ == "__main__":
    main()
