"""The time between tokens beside prompts, without the noise of a machine: real schedules, given step times.

Usage: python -m scripts.simulate_gaps [--models qwen,gemma,1b,bf16] [--loads 7] [--longest 256] [--prefer balanced]

A load is 24 requests, of which 16 are in flight, with prompts of 16 to `--longest` tokens and 16 to 128 new ones. The
engine's scheduler plans it over the fake context of the tests, whose steps take virtual time. Beside it stands
llama-server's policy: each step has a token of each stream, and then prompts in order, up to 2,048 tokens.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from random import Random
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from cppbatch import SamplingParams
from cppbatch.bench.prompts import Lengths
from cppbatch.config import Preference
from tests.support.fakes import context_of, fake_engine

CLIENTS, REQUESTS, N_BATCH, N_UBATCH = 16, 24, 2048, 512
COLUMNS = ("tokens/s", "between p50", "p95", "p99", "longest, ms", "first token p50", "p95, s")
Request = tuple[int, int]
"""Prompt tokens and new tokens."""


class Law(NamedTuple):
    """What steps cost on a machine, in milliseconds."""

    rows: dict[int, float]
    """By number of decode rows."""
    piece: float
    """Of a piece of a prompt, apart from its tokens."""
    token: float
    """Of a prompt token."""
    attention: float
    """Of a prompt token for each token before it."""
    cell: float
    """Of a decode row for each of its cells."""

    def step_s(self, groups: Iterable[int], cells: int, pieces: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step. `cells`: of all decode rows. `pieces`: tokens, and tokens before them."""
        rows = sum(float(np.interp(n, list(self.rows), list(self.rows.values()))) for n in groups)
        prompts = sum(self.piece + n * (self.token + self.attention * (before + n / 2)) for n, before in pieces)
        return (rows + self.cell * cells + prompts) / 1000


LAWS = {
    "qwen": Law({1: 38, 4: 60, 8: 85, 16: 126, 32: 235, 512: 3000}, 30, 4.7, 0.0014, 0.002),
    "gemma": Law({1: 18, 4: 30, 8: 46, 16: 72, 32: 130, 512: 1600}, 14, 2.3, 0.0004, 0.001),
    "1b": Law({1: 70, 4: 90, 8: 110, 16: 150, 32: 260, 512: 3000}, 60, 5.6, 0.001, 0.003),
    "bf16": Law({1: 10.4, 4: 13.6, 8: 17.8, 16: 26, 32: 43, 512: 560}, 8, 1.0, 0.0006, 0.002),
}
"""Two EPYC cores, fitted to measured loads: Qwen2.5-Coder 0.5B and Gemma 3 270M (Q4_K_M), a 1B (Q4_0), the default
model in BF16."""


class Times:
    """The times of the tokens of a load."""

    def __init__(self, requests: Sequence[Request], now: float) -> None:
        self.requests, self.began = requests, now
        self.arrived = [0.0] * len(requests)
        self.tokens: list[list[float]] = [[] for _ in requests]

    def figures(self) -> list[float]:
        """As `COLUMNS`."""
        gaps = sorted(b - a for times in self.tokens for a, b in itertools.pairwise(times))
        firsts = sorted(times[0] - at for times, at in zip(self.tokens, self.arrived, strict=True))
        took = max(times[-1] for times in self.tokens) - self.began
        between = [1000 * gaps[int(part * len(gaps))] for part in (0.5, 0.95, 0.99)]
        first = [firsts[int(part * len(firsts))] for part in (0.5, 0.95)]
        return [sum(n for _, n in self.requests) / took, *between, 1000 * gaps[-1], *first]


def load(seed: int, longest: int) -> list[Request]:
    """Prompts and outputs of these lengths, in another order for each seed."""
    random, lengths = Random(seed), [Lengths(16, longest).spread(REQUESTS), Lengths(16, 128).spread(REQUESTS)]
    for each in lengths:
        random.shuffle(each)
    return list(zip(*lengths, strict=True))


class Engine:
    """cppbatch, in virtual time. It knows what steps cost from the loads before."""

    def __init__(self, law: Law, prefer: Preference) -> None:
        self.now, self._law = 1000.0, law
        self._engine = fake_engine(
            on_plan=self._take, n_ctx=32768, n_batch=N_BATCH, n_ubatch=N_UBATCH, n_parallel=CLIENTS, unified=False,
            n_ctx_train=1 << 20, max_queue=1000, prefer=prefer,
        )  # fmt: skip
        context = context_of(self._engine)
        self._decode, self._plan = context.decode, None
        context.decode = self._timed  # type: ignore[method-assign]

    def clock(self) -> float:
        """The virtual time."""
        return self.now

    def _take(self, plan: Any) -> None:
        self._plan = plan

    def _timed(self, batch: Any) -> None:
        plan: Any = self._plan
        rows = {sequence for sequence, n in plan.chunks if sequence.n_pending == 1 and sequence.n_generated}
        pieces = [(n, s.n_computed) for s, n in plan.chunks if s not in rows and (n > 1 or not plan.n_beside)]
        self.now += self._law.step_s(plan.row_groups, sum(sequence.n_tokens for sequence in rows), pieces)
        self._decode(batch)

    def run(self, requests: Sequence[Request]) -> list[float]:
        """The figures of a load."""
        times, queue, of_id, n_running = Times(requests, self.now), list(enumerate(requests)), dict[str, int](), 0
        while queue or n_running:
            for i, (n_prompt, n_new) in queue[: CLIENTS - n_running]:
                params = SamplingParams(max_tokens=n_new, temperature=0.0, ignore_eos=True)
                of_id[self._engine.add_request([5] * (n_prompt - 1) + [6 + i], params)] = i
                times.arrived[i] = self.now
            n_running, queue = min(CLIENTS, n_running + len(queue)), queue[CLIENTS - n_running :]
            for event in self._engine.step():
                if event.tokens:
                    times.tokens[of_id[event.request_id]].append(self.now)
                n_running -= event.finish_reason is not None
            self.now += 0.001
        return times.figures()


class Slot:
    """A slot of llama-server."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, (self.n_prompt, self.n_left) = number, request
        self.n_read = self.n_cells = 0


def run_llama_server(law: Law, requests: Sequence[Request]) -> list[float]:
    """The figures of a load with llama-server's policy."""
    now, times, queue, slots = 0.0, Times(requests, 0.0), list(enumerate(requests)), list[Slot]()
    while queue or slots:
        for i, _ in queue[: CLIENTS - len(slots)]:
            times.arrived[i] = now
        n_free = CLIENTS - len(slots)
        slots, queue = [*slots, *(Slot(i, request) for i, request in queue[:n_free])], queue[n_free:]
        rows = [slot for slot in slots if slot.n_read == slot.n_prompt]
        n_decode, n_left, pieces = len(rows), N_BATCH - len(rows), list[tuple[int, int]]()
        cells = sum(slot.n_cells for slot in rows)
        for slot in slots:
            if n := min(n_left, slot.n_prompt - slot.n_read):
                pieces += [(min(N_UBATCH, n - at), slot.n_read + at) for at in range(0, n, N_UBATCH)]
                slot.n_read, slot.n_cells, n_left = slot.n_read + n, slot.n_cells + n, n_left - n
                rows += [slot] if slot.n_read == slot.n_prompt else []
        now += 0.002 + law.step_s([n_decode] if n_decode else [], cells, pieces)
        for slot in rows:
            times.tokens[slot.number].append(now)
            slot.n_left, slot.n_cells = slot.n_left - 1, slot.n_cells + 1
        slots = [slot for slot in slots if slot.n_left]
    return times.figures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(LAWS))
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--longest", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--prefer", default="balanced", help="of several, with commas")
    args = parser.parse_args()
    loads = [load(seed, args.longest) for seed in range(args.loads)]
    print(f"{'':26}", *(f"{column:>15}" for column in COLUMNS))
    for name in args.models.split(","):
        show(f"{name} llama-server", [run_llama_server(LAWS[name], each) for each in loads])
        for prefer in args.prefer.split(","):
            engine = Engine(LAWS[name], prefer)
            with ExitStack() as clocks:
                for module in ("core", "observe.metrics", "input_processor"):
                    clocks.enter_context(patch(f"cppbatch.engine.{module}.perf_counter", engine.clock))
                engine.run(loads[-1])  # learns what steps cost
                show(f"{name} {prefer}", [engine.run(each) for each in loads])


def show(name: str, runs: Sequence[Sequence[float]]) -> None:
    """Prints the medians of several loads."""
    print(f"{name:26}", *(f"{median(column):15.1f}" for column in zip(*runs, strict=True)), flush=True)


if __name__ == "__main__":
    main()
