#!/usr/bin/env python3
"""Times a snapshot of `GET /live`: making it, the worker's message, and the server's event, in microseconds.

    .venv/bin/python scripts/bench_live.py [-m model.gguf] [-n 16,64,256]

`scripts/bench_beside.py readers` measures what its readers cost the running streams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median
from time import perf_counter

import msgspec
from measuring import markdown_table, numbers, script_arguments

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.prompts import random_text
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.models.pull import choose_model

REPEATS, N_PROMPT, N_WAITING = 200, 48, 8


def microseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return 1e6 * median(times)


def main() -> None:
    """Prints a row for each number of sequences."""
    parser = script_arguments(__doc__)
    parser.add_argument("-n", type=numbers, default=[16, 64, 256], help="sequences of the snapshots (16,64,256)")
    args = parser.parse_args()
    shared, rows = random_text(Random(0), N_PROMPT), []
    for n in args.n:
        model = choose_model(args.model)
        with BatchInferenceEngine(model, n_parallel=n, n_ctx=160 * n, kv_layout="unified", spec="off") as engine:
            for i in range(n + N_WAITING):
                engine.add_request(f"{shared} {i}", SamplingParams(max_tokens=64, ignore_eos=True))
            running = engine.core.scheduler.running
            while not all(sequence.n_generated for sequence in running) or len(running) < n:
                engine.step()
            live = engine.live()
            sent = msgspec.msgpack.encode(live)
            calls: list[Callable[[], object]] = [
                engine.live, partial(msgspec.msgpack.encode, live),
                partial(msgspec.msgpack.decode, sent, type=LiveEngine), partial(msgspec.json.encode, live),
            ]  # fmt: skip
            kb = len(msgspec.json.encode(live)) / 1000
            times = [f"{microseconds(call):.0f}" for call in calls]
            rows.append([str(n), str(len(live.cells.segments)), *times, f"{kb:.1f}"])
    print(markdown_table(["sequences", "segments", "live, us", "encode, us", "decode, us", "JSON, us", "KB"], rows))


if __name__ == "__main__":
    main()
