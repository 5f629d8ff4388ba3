#!/usr/bin/env python3
"""Seconds from the start of `cppbatch serve` to the first token of an answer: the median of several starts.

.venv/bin/python scripts/bench_start.py [--repeats 5] [-- -m model.gguf]
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import sys
import time
from statistics import median

TIMEOUT_S = 120
BODY = json.dumps({"prompt": "Hello", "max_tokens": 4, "stream": True})


def free_port() -> int:
    """Returns a TCP port that is unused now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_token(arguments: list[str]) -> float:
    """Returns the seconds of one start. The client repeats its request until the server answers."""
    port = free_port()
    command = [sys.executable, "-m", "cppbatch", "serve", "--port", str(port), *arguments]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while time.perf_counter() - began < TIMEOUT_S and server.poll() is None:
                if answers(port):
                    return time.perf_counter() - began
                time.sleep(0.01)
            raise SystemExit(f"no answer within {TIMEOUT_S} s; the command was: {' '.join(command)}")
        finally:
            server.terminate()


def answers(port: int) -> bool:
    """Whether the server sends the first event of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status == 200 and answer.readline().startswith(b"data: {")
    except OSError:
        return False
    finally:
        connection.close()


def main() -> None:
    """Prints each start and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    options = parser.parse_args()
    first_token(options.rest)  # brings the files into the file cache
    starts = [first_token(options.rest) for _ in range(options.repeats)]
    print("start to first token:", "  ".join(f"{start:.2f}" for start in starts), f"  median {median(starts):.2f} s")


if __name__ == "__main__":
    main()
