"""The time between tokens beside prompts, without the noise of a machine: real schedules, given step times.

    python -m scripts.simulate_gaps [--models qwen,gemma,1b,bf16] [--loads 7] [--longest 256] [--prefer balanced,10]

The engine's scheduler plans a load over the fake context of the tests, whose steps take virtual time. It is compared
with llama-server's policy: each step has a token of each stream, and then prompts in order, up to 2,048 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import markdown_table

from cppbatch import SamplingParams
from cppbatch.bench.prompts import Lengths
from cppbatch.config import Preference
from cppbatch.engine import step_budget
from tests.support.fakes import context_of, fake_engine

N_BATCH, N_UBATCH = 2048, 512
COLUMNS = ("tokens/s", "between p50", "p95", "p99", "longest, ms", "first token p50", "p95, s", "of their speed")
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

    def part(self, layers: float) -> Law:
        """Returns the costs with this part of the layers."""
        rows = {n: layers * milliseconds for n, milliseconds in self.rows.items()}
        return Law(rows, *(layers * cost for cost in self[1:]))


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


def load(seed: int, n: int, prompt: Lengths, new: Lengths) -> list[Request]:
    """Returns prompts and outputs of these lengths, in another order for each seed."""
    random, lengths = Random(seed), [prompt.spread(n), new.spread(n)]
    for each in lengths:
        random.shuffle(each)
    return list(zip(*lengths, strict=True))


class Engine:
    """cppbatch, in virtual time. It knows what steps cost from the loads before."""

    def __init__(self, law: Law, prefer: Preference, n_clients: int, longest: int) -> None:
        """`longest`: tokens of a sequence."""
        self.now, self._law, self._clients = 1000.0, law, n_clients
        cells = max(2048, -(-longest // 256) * 256)
        self._engine = fake_engine(
            on_plan=self._take, n_ctx=n_clients * cells, n_batch=N_BATCH, n_ubatch=N_UBATCH, n_parallel=n_clients,
            unified=False, n_ctx_train=1 << 20, max_queue=1000, prefer=prefer,
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
        rows = {sequence for sequence, n in plan.scheduled if sequence.n_pending == 1 and sequence.n_generated}
        pieces = [(n, s.n_computed) for s, n in plan.scheduled if s not in rows and (n > 1 or not plan.n_beside)]
        self.now += self._law.step_s(plan.row_groups, sum(sequence.n_tokens for sequence in rows), pieces)
        self._decode(batch)

    def run(self, requests: Sequence[Request]) -> list[float]:
        """The figures of a load."""
        times, queue, of_id, n_running = Times(requests, self.now), list(enumerate(requests)), dict[str, int](), 0
        while queue or n_running:
            for i, (n_prompt, n_new) in queue[: self._clients - n_running]:
                params = SamplingParams(max_tokens=n_new, temperature=0.0, ignore_eos=True)
                of_id[self._engine.add_request([5] * (n_prompt - 1) + [6 + i], params)] = i
                times.arrived[i] = self.now
            n_free = self._clients - n_running
            n_running, queue = n_running + len(queue[:n_free]), queue[n_free:]
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


def run_llama_server(law: Law, requests: Sequence[Request], n_clients: int) -> list[float]:
    """The figures of a load with llama-server's policy."""
    now, times, queue, slots = 0.0, Times(requests, 0.0), list(enumerate(requests)), list[Slot]()
    while queue or slots:
        for i, _ in queue[: n_clients - len(slots)]:
            times.arrived[i] = now
        n_free = n_clients - len(slots)
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


def run_engine(law: Law, prefer: str, loads: Sequence[Sequence[Request]], n_clients: int) -> list[list[float]]:
    """Returns the figures of loads. `prefer`: a setting, or a multiple of a step without prefill for `balanced`."""
    is_multiple = prefer[0].isdecimal()
    longest = max(n_prompt + n_new for requests in loads for n_prompt, n_new in requests)
    with ExitStack() as patched:
        if is_multiple:
            patched.enter_context(patch.dict(step_budget._SLOWDOWN, balanced=float(prefer) - 1))
        engine = Engine(law, "balanced" if is_multiple else prefer, n_clients, longest)  # type: ignore[arg-type]
        for module in ("core", "observe.metrics", "input_processor"):
            patched.enter_context(patch(f"cppbatch.engine.{module}.perf_counter", engine.clock))
        engine.run(loads[-1])  # learns what steps cost
        return [engine.run(each) for each in loads]


def row(name: str, runs: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[str]:
    """Returns the medians of several loads, and that of the ratios of tokens/s."""
    ratio = median(ours[0] / their[0] for ours, their in zip(runs, theirs, strict=True))
    return [name, *(f"{median(column):.1f}" for column in zip(*runs, strict=True)), f"{ratio:.3f}"]


def main() -> None:
    """Prints a row for llama-server's policy and one for each setting, with the ratio of tokens/s to that policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(LAWS))
    parser.add_argument("--layers", type=float, default=1, help="part of the model's layers, such as 0.25 (all)")
    for name, default in {"loads": 7, "requests": 24, "clients": 16, "shortest": 16, "longest": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default}; shortest, longest: prompts)")
    parser.add_argument("--new", default="16,128", help="new tokens, or their range (16,128)")
    parser.add_argument("--prefer", default="balanced", help="settings, or multiples of a step: 7,10,13")
    args = parser.parse_args()
    new = list(map(int, args.new.split(",")))
    sizes = [Lengths(args.shortest, args.longest), Lengths(new[0], new[-1])]
    loads = [load(seed, args.requests, *sizes) for seed in range(args.loads)]
    rows = []
    for name in args.models.split(","):
        law = LAWS[name].part(args.layers)
        theirs = [run_llama_server(law, each, args.clients) for each in loads]
        rows.append(row(f"{name} llama-server", theirs, theirs))
        for prefer in args.prefer.split(","):
            rows.append(row(f"{name} {prefer}", run_engine(law, prefer, loads, args.clients), theirs))
    print(markdown_table(["", *COLUMNS], rows))


if __name__ == "__main__":
    main()
