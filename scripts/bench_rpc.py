#!/usr/bin/env python3
"""Measures one model split over two RPC workers of this machine: speed, texts, and bytes on the wire for a token.

    .venv/bin/python scripts/bench_rpc.py [-m MODEL.gguf] [-np 16] [--new 64] [--threads 1] [--turns 3]

Every row writes the same texts. Bytes are those of the engine's connections, as Linux counts them (`ss`, iproute2).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from measuring import Comparison, script_arguments
from server_process import ChildProcess

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.report import Column
from cppbatch.models.pull import choose_model

PLACES = "Rome Oslo Lima Cairo Delhi Tokyo Paris Quito Accra Hanoi Sofia Minsk Tunis Dakar Malta Riga".split()
SPLIT: dict[str, Any] = {"tensor_split": (1.0, 1.0)}
VARIANTS: dict[str, dict[str, Any]] = {
    "one process": {"spec": "off"},
    "two workers": {**SPLIT, "spec": "off"},
    "two workers, `--sampling host`": {**SPLIT, "spec": "off", "sampling": "host"},
    "two workers, `--sampling host --spec suffix`": {**SPLIT, "spec": "suffix", "sampling": "host"},
}
COLUMNS = [
    Column("tokens_per_second", "tokens/s", 0), Column("same", "same texts", 0),
    Column("sent", "KiB a token, sent"), Column("received", "received"),
]  # fmt: skip


@contextlib.contextmanager
def rpc_worker(threads: int) -> Iterator[int]:
    """Runs `cppbatch rpc-worker` on a free port, which it yields."""
    with ChildProcess([sys.executable, "-m", "cppbatch", "rpc-worker", "--port", "0", "-t", str(threads)]) as process:
        while not (ready := re.search(r"^serving .*:(\d+)$", process.output(), re.MULTILINE)):
            if process.wait(0.1) is not None:
                sys.exit(f"the RPC worker does not start: {process.output()}")
        yield int(ready[1])


def traffic(ports: list[int]) -> dict[str, int]:
    """Returns the bytes sent to these ports and received from them so far, of open connections."""
    connections = " or ".join(f"dport = :{port}" for port in ports)
    printed = subprocess.run(["ss", "-Htin", connections], capture_output=True, text=True, check=True).stdout
    return {what: sum(map(int, re.findall(rf"bytes_{what}:(\d+)", printed))) for what in ("sent", "received")}


def main() -> None:
    """Prints a row for each variant."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("-np", type=int, default=16, dest="n_parallel")
    parser.add_argument("--new", type=int, default=64, help="tokens of each text")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    args = parser.parse_args()
    n, expected, model = args.n_parallel, list[list[int]](), choose_model(args.model)
    prompts = [f"Write the story of the {i}. day of a journey to {PLACES[i % len(PLACES)]}:" for i in range(n)]

    with rpc_worker(args.threads) as one, rpc_worker(args.threads) as other:

        def measure(name: str, turn: int) -> dict[str, float | None]:
            """Loading and a warm-up do not count."""
            ports = [one, other] if "tensor_split" in VARIANTS[name] else []
            settings = {"n_ctx": 256 * n, "n_parallel": n, "prefix_cache": False, **VARIANTS[name]}
            settings["rpc"] = tuple(f"127.0.0.1:{port}" for port in ports)
            with BatchInferenceEngine(model, **settings) as engine:
                engine.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
                before, began = traffic(ports) if ports else {}, perf_counter()
                params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
                tokens = [each.tokens for each in engine.generate(prompts, params)]
                seconds, after = perf_counter() - began, traffic(ports) if ports else {}
            expected.extend(() if expected else tokens)
            figures = {key: (after[key] - before[key]) / (n * args.new * 1024) for key in before}
            same = sum(text == first for text, first in zip(tokens, expected, strict=True))
            return {"tokens_per_second": sum(map(len, tokens)) / seconds, "same": same, **figures}

        found = Comparison(VARIANTS).measure(args.turns, measure)
    print(found.table(COLUMNS, {"tokens_per_second": "of one process"}))


if __name__ == "__main__":
    main()
