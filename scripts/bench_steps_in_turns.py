#!/usr/bin/env python3
"""Compares two source trees, or engine settings, on free text: their engines take single steps alternately.

A shared machine is twice as fast in one minute as in the next, so runs one after the other say little. Here each
variant is a process with an engine of its own, only one of them steps at a time, and each has a clock that runs only
during its own steps. The ratio of two variants changes by some percent from round to round.

    .venv/bin/python scripts/bench_steps_in_turns.py -m model.gguf before=../old-tree now=.
    .venv/bin/python scripts/bench_steps_in_turns.py -m model.gguf f16=. q8_0='.:{"cache_type_k": "q8_0"}'
    .venv/bin/python scripts/bench_steps_in_turns.py -m model.gguf -B 4 off=. auto='.:{"spec": "auto"}'

With a model that `scripts/bench_draft_head.py --models` kept, --cycle measures its head: off=. mtp='.:{"spec": "mtp"}'.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from measuring import MeasuringChild

MIN_NEW, MAX_NEW = 16, 128  # tokens
SAMPLES_NEW = 64  # of each sample, and of each text of the cycle
CYCLE = range(8, 512)  # tokens, in the order in which the model of bench_draft_head.py writes them
SPIN_S = 0.006  # how long compute threads of the engine that stepped last wait on their cores for more (libgomp)
WORKER = "worker"

Request = tuple["str | list[int]", int]
"""A prompt and the number of new tokens."""


def make_requests(seed: int, n: int, shortest: int, longest: int, load: str) -> list[Request]:
    """Returns the same requests for the same arguments. `load`: mixed, samples or cycle."""
    from cppbatch.bench.prompts import random_text

    chance = random.Random(seed)

    def mixed() -> Request:
        prompt = random_text(chance, int(math.exp(chance.uniform(math.log(shortest), math.log(longest)))))
        return prompt, chance.randint(MIN_NEW, MAX_NEW)

    if load == "samples":
        return [(random_text(chance, shortest), SAMPLES_NEW)] * n
    if load == "cycle":
        starts = [chance.randrange(len(CYCLE)) for _ in range(n)]
        return [([*CYCLE, *CYCLE][start : start + shortest], SAMPLES_NEW) for start in starts]
    return [mixed() for _ in range(n)]


class Worker:
    """An engine that steps on request. At most `at_once` requests run; the next one is added when one has ended."""

    def __init__(self, model: str, at_once: int, settings: dict[str, Any]) -> None:
        from cppbatch import BatchInferenceEngine, EngineConfig
        from cppbatch.engine import compute_threads

        # No other program is seen: each engine would compute with fewer threads, because the others keep cores busy.
        compute_threads.read_cpu_times = lambda: compute_threads.CpuTimes(0.0, 0.0)
        sizes = {"n_parallel": at_once, "n_ctx": 1024 * at_once, "spec": "off"}
        self._engine = BatchInferenceEngine(EngineConfig(model, **{**sizes, **settings}))
        self._at_once = at_once

    def begin(self, *load: Any) -> None:
        """Begins a round of requests, the same for all workers. `load`: as `make_requests`."""
        self._waiting, self._temperature = make_requests(*load), 0.0 if load[-1] == "cycle" else 0.8
        self._now_s, self._n_tokens = 0.0, 0
        self._started: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._gaps: list[float] = []
        self._ttft: list[float] = []
        for _ in range(self._at_once):
            self._add()

    def _add(self) -> None:
        from cppbatch import SamplingParams

        if self._waiting:
            prompt, n_new = self._waiting.pop()
            fields: dict[str, Any] = {"temperature": self._temperature, "seed": len(self._waiting), "ignore_eos": True}
            self._started[self._engine.add_request(prompt, SamplingParams(max_tokens=n_new, **fields))] = self._now_s

    def step(self) -> bool:
        """Computes one batch. Returns whether there is more to compute."""
        sleep(SPIN_S)
        began = perf_counter()
        events = self._engine.step()
        self._now_s += perf_counter() - began
        for event in events:
            self._n_tokens += len(event.tokens)
            if event.tokens and event.request_id in self._latest:
                self._gaps.append(self._now_s - self._latest[event.request_id])
            elif event.tokens:
                self._ttft.append(self._now_s - self._started[event.request_id])
            self._latest[event.request_id] = self._now_s
            if event.finish_reason:
                self._add()
        return self._engine.has_work

    def report(self) -> dict[str, float]:
        """Tokens/s, and milliseconds."""
        gaps, ttft = sorted(self._gaps), sorted(self._ttft)
        found = {"tokens/s": self._n_tokens / self._now_s}
        found |= {f"between tokens, p{p}": 1000 * gaps[len(gaps) * p // 100] for p in (50, 95, 99)}
        return found | {"longest": 1000 * gaps[-1], "first token, p95": 1000 * ttft[len(ttft) * 95 // 100]}


def work(model: str, at_once: str, settings: str) -> None:
    """The process of a variant: answers as `answer_lines`, which another tree may not have."""
    worker = Worker(model, int(at_once), json.loads(settings or "{}"))
    for line in sys.stdin:
        name, *args = json.loads(line)
        print("answer " + json.dumps(getattr(worker, name)(*args)), flush=True)


def run_round(variants: Sequence[MeasuringChild], seed: int, *load: int | str) -> list[dict[str, float]]:
    """Returns the report of each variant for one round. `load`: as `make_requests`."""
    for variant in variants:
        variant.ask("begin", seed, *load)
    left, order = list(variants), random.Random(seed)
    while left:
        order.shuffle(left)  # the first step after another engine's finds the caches cold
        left = [variant for variant in left if variant.ask("step")]
    return [variant.ask("report") for variant in variants]


def main() -> None:
    """Prints a row for each variant: medians, with those of the ratios to the first variant and their range."""
    if sys.argv[1:2] == [WORKER]:
        return work(*sys.argv[2:])
    from measuring import Comparison, MeasuringChild, markdown_table, script_arguments

    parser = script_arguments(__doc__)
    parser.add_argument("variants", nargs="+", metavar="NAME=TREE[:JSON]", help="JSON: fields of EngineConfig")
    parser.add_argument("-B", dest="at_once", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32, help="of a round")
    parser.add_argument("--shortest", type=int, default=20, help="prompt tokens (20)")
    parser.add_argument("--longest", type=int, default=500, help="prompt tokens (500)")
    loads = parser.add_mutually_exclusive_group()
    for load, about in (
        ("samples", "all requests of a round are samples of one prompt"),
        ("cycle", "the text of bench_draft_head.py's model"),
    ):
        loads.add_argument(f"--{load}", dest="load", action="store_const", const=load, default="mixed", help=about)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not args.model:
        parser.error("-m MODEL is missing")  # other trees may have another default
    worker = [sys.executable, __file__, WORKER, Path(args.model).resolve(), args.at_once]
    named = {name: value.partition(":") for name, _, value in (each.partition("=") for each in args.variants)}
    with ExitStack() as stack:
        variants = [
            stack.enter_context(
                MeasuringChild([*worker, settings], env={**os.environ, "PYTHONPATH": str(Path(tree).resolve())})
            )
            for tree, _, settings in named.values()
        ]
        found = Comparison(named)
        for turn in range(-1, args.rounds):
            reports = run_round(variants, turn + 1, args.requests, args.shortest, args.longest, args.load)
            for name, report in zip(named, reports, strict=True):
                found.note(name, turn, report)
    titles, first = list(reports[0]), found.names[0]

    def shown(name: str, title: str) -> str:
        ratio = found.ratio(title, name, first) if name != first else None
        text = f" ({ratio.median:.2f}, {ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""
        return f"{found.median(name, title):,.0f}{text}"

    print(markdown_table(["", *titles], [[name, *(shown(name, title) for title in titles)] for name in named]))
    return None


if __name__ == "__main__":
    main()
