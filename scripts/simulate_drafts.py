#!/usr/bin/env python3
"""Simulates what drafts gain, without the noise of a machine: real drafts, given step times.

    .venv/bin/python scripts/simulate_drafts.py MODEL.gguf [-B 1,4,16] [--workloads quote,json] [--disturbed 8]
    .venv/bin/python scripts/simulate_drafts.py --head [--gpu] [-B 1,4,16] [--acceptance 0,60,80,100] [--runs 8]

With a model: it writes the texts of each workload once; then they are generated again in simulated steps. The engine's
`SuffixProposer` and `Speculator` draft, a draft token is accepted if it is the next one of the text, and a step takes
the time that decision 0033 gives for its rows. Prompts, grammars and sampling take no time, so this is the gain of
decode alone. `best copies`: the tokens of a step of one sequence that always knows which earlier occurrence of its last
token matches longest. --disturbed N: the engine learns the step times beside another program: 4% of the steps seem to
take 2 to 8 times as long, and half of the first steps of a number of rows 5 times. Medians of N runs.

--head: a draft head (MTP) drafts the next token, except for the share of tokens that it misses. The target and the head
take the times of `scripts/bench_draft_head.py`'s model (1.1 GB, Q8_0), which the engine learns while 4% of the decodes
are disturbed. --gpu: the times of an H100, where the first decode of each size takes longer, and so does a step with
another number of rows than the last one. Prints medians with their quartiles, and the gain of the best number of draft
tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from statistics import median, quantiles
from typing import Any

import numpy as np
from measuring import numbers, words

from cppbatch import BatchInferenceEngine, GenerationRequest, SamplingParams
from cppbatch.bench.speculation_speedup import chat_prompt
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.head_proposer import HeadProposer
from cppbatch.engine.speculation.speculator import DraftLimits, Speculator
from cppbatch.engine.speculation.suffix_proposer import SuffixProposer
from cppbatch.engine.step_cost import Groups, StepCost
from cppbatch.llama import Batch, HeadBatch

DRAFT_MAX = 16
N_VOCAB, N_PROMPT = 512, 32  # of the head's model

Text = tuple[list[int], list[int]]
"""The tokens of a prompt and of its completion."""


@dataclass(frozen=True)
class Device:
    """Where the decodes run."""

    step_ms: dict[int, float]
    """By number of rows."""
    prompt_token_s: float
    head: float = 0.0
    """The time of a decode of the head, relative to one of the model with as many rows."""
    head_ms: float = 0.0
    """In addition to that."""
    first_ms: float = 0.0
    """In addition, for the first decode of a size."""
    other_rows_ms: float = 0.0
    """In addition, for a step with another number of rows than the last one."""
    first_factor: float = 1.0
    """Half of the first steps of a number of rows seem to take this many times as long."""

    def step_s(self, n: int) -> float:
        """Returns the seconds of a step of this number of rows."""
        return float(np.interp(n, list(self.step_ms), list(self.step_ms.values()))) / 1000

    def head_s(self, n: int) -> float:
        """Returns the same of the head."""
        return self.head * self.step_s(n) + self.head_ms / 1000


TEXTS = Device(
    {1: 10.4, 4: 13.6, 8: 17.8, 16: 26.0, 32: 43.0, 64: 76.0, 128: 143.0, 256: 280.0}, 0.00105, first_factor=5
)
"""BF16, two AVX-512 cores, per-sequence layout, flash attention (0033; 256 is extrapolated)."""
CPU = Device(
    step_ms={
        1: 39.0, 2: 67.0, 4: 81.0, 8: 122.0, 12: 160.0, 16: 199.0, 24: 294.0, 32: 370.0, 64: 735.0, 256: 2940.0,
    },
    prompt_token_s=0.0105,
    head=0.08,
)  # fmt: skip
"""Two AVX-512 cores, per-sequence layout, flash attention."""
GPU = Device(
    step_ms={1: 1.35, 2: 1.5, 4: 1.9, 8: 2.3, 16: 3.2, 32: 4.0, 64: 5.5, 256: 12.0},
    prompt_token_s=0.00015,
    head=0.03,
    head_ms=0.5,
    first_ms=2.0,
    other_rows_ms=1.0,
)
"""An H100, with the time of Python."""


class Machine:
    """The times of decodes, and the clock. The engine measures both, unless it knows the times."""

    def __init__(self, device: Device, seed: int | None) -> None:
        """`seed`: of the disturbances; None: no disturbances, and the engine has the exact times."""
        self.device, self.cost, self.now = device, StepCost(), 0.0
        self._random = None if seed is None else Random(seed)
        self._seen: set[tuple[bool, int]] = set()
        self._last = 0  # rows of the last step
        if seed is None:
            self.cost.seed((n, device.step_s(n)) for n in range(1, max(device.step_ms) + 1))
        else:
            self.cost.observe_prompt(N_PROMPT, N_PROMPT * device.prompt_token_s)

    def clock(self) -> float:
        """Returns the time in seconds."""
        return self.now

    def decode(self, n: int, *, head: bool = False) -> float:
        """Computes `n` rows. Returns their usual time; the clock may advance more."""
        device = self.device
        seconds, disturbed = device.head_s(n) if head else device.step_s(n), 1.0
        size = head, n if n <= 8 else 8 + n.bit_length()
        if self._random:
            disturbed = self._random.uniform(2, 8) if self._random.random() < 0.04 else 1.0
            if size not in self._seen:
                self.now += device.first_ms / 1000
                disturbed *= device.first_factor if self._random.random() < 0.5 else 1.0
            disturbed *= self._random.lognormvariate(0, 0.05)
        self._seen.add(size)
        if not head:
            seconds += device.other_rows_ms / 1000 if n != self._last else 0.0
            self._last = n
        self.now += seconds * disturbed
        return seconds

    def observe(self, groups: Groups, seconds: float) -> None:
        """Lets the engine measure a step."""
        if self._random:
            self.cost.observe_rows(groups, seconds)


class Head:
    """The context of a head that drafts the next token of a text, except after the tokens that it misses."""

    n_row = 4
    n_seq_max = 16
    n_logits = 256
    reads_first = True

    def __init__(self, machine: Machine, acceptance: float, seed: int) -> None:
        self.n_ctx = self.n_batch = 1 << 16
        tokens = list(range(N_VOCAB))
        Random(seed).shuffle(tokens)
        self.missed = set(tokens[: round((1 - acceptance) * N_VOCAB)])
        self._machine = machine
        self._outputs: list[int] = []
        self.seconds = 0.0
        """The usual time of its decodes."""

    def new_batch(self) -> HeadBatch:
        """As `HeadContext.new_batch`."""
        return HeadBatch(4096, self.n_row)

    def decode(self, batch: Batch) -> None:
        """As `Context.decode`."""
        n = batch.n_tokens
        self.seconds += self._machine.decode(n, head=True)
        self._outputs = batch.tokens[:n][batch.wants_logits[:n] > 0].tolist()

    def logits(self, n_outputs: int) -> Any:
        """As `Context.logits`."""
        rows = np.zeros((n_outputs, N_VOCAB), np.float32)
        rows[np.arange(n_outputs), [self.draft(token) for token in self._outputs]] = 12
        return rows

    def draft(self, token: int) -> int:
        """The token that it drafts after this one."""
        return (token + 1 + (token in self.missed)) % N_VOCAB

    def hidden_rows(self, n: int) -> Any:
        """As `Context.hidden_rows`."""
        return np.zeros((n, self.n_row), np.float32)

    def encode(self, rows: Any) -> Any:
        """As `HeadContext.encode`."""
        return rows

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool:
        """As `Context.remove`."""
        return True

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """As `Context.copy`."""

    def clear(self) -> None:
        """As `Context.clear`."""

    def use_threads(self, n: int) -> None:
        """As `Context.use_threads`."""

    def close(self) -> None:
        """As `Context.close`."""

    def open_again(self) -> None:
        """As `HeadContext.open_again`."""


class Simulation:
    """Texts that are generated again in simulated steps, as the engine's scheduler does."""

    def __init__(self, machine: Machine, head: Head | None) -> None:
        self._machine, self._head = machine, head
        self._proposer: Any = SuffixProposer()
        if head:
            no_rows: Callable[[int], Any] = lambda n: np.zeros((n, head.n_row), np.float32)  # noqa: E731
            self._proposer = HeadProposer(head, no_rows, 1 << 16, clock=machine.clock)
        self._speculator = Speculator([self._proposer], DRAFT_MAX, wall=machine.clock if head else float)
        self.n_drafted = self.n_accepted = 0

    def run(self, cases: Sequence[Text], batch_size: int) -> float:
        """Returns the speedup of decode."""
        waiting, running = list(cases), dict[Seq, list[int]]()
        seconds = plain_seconds = 0.0
        last: tuple[Groups, bool] = ((), False)
        while waiting or running:
            while waiting and len(running) < batch_size:
                prompt, completion = waiting.pop(0)
                free = set(range(batch_size)) - {sequence.seq_id for sequence in running}
                running[self._begin(str(len(waiting)), prompt, completion, min(free))] = completion
            rows = sorted(running, key=lambda sequence: sequence.seq_id)
            step_s, groups, last = self._step(rows, last, is_queue_empty=not waiting)
            seconds += step_s
            accepted = {sequence: self._verify(sequence, running[sequence]) for sequence in rows}
            plain_seconds += sum(1 + n for n in accepted.values()) * self._machine.device.step_s(len(rows)) / len(rows)
            if sum(groups) > len(rows):
                self._speculator.verified(accepted, 0.0)
            for sequence in rows:
                if sequence.n_tokens - sequence.n_prompt >= len(running[sequence]):
                    self._speculator.finished(sequence)
                    del running[sequence]
        return plain_seconds / seconds

    def _begin(self, name: str, prompt: list[int], completion: list[int], seq_id: int) -> Seq:
        request = GenerationRequest(id=name, prompt=prompt, cache_prompt=not self._head)
        sequence = Seq(request, np.array(prompt, np.int32), max_new=len(completion) + DRAFT_MAX, seed=0, now=0.0)
        sequence.seq_id = seq_id
        if self._head:
            self._machine.now += len(prompt) * self._machine.device.prompt_token_s
            self._proposer.computed([(sequence, len(prompt))])
        sequence.n_computed = len(prompt)
        extend(sequence, completion[:1])
        return sequence

    def _step(
        self, rows: list[Seq], last: tuple[Groups, bool], *, is_queue_empty: bool
    ) -> tuple[float, Groups, tuple[Groups, bool]]:
        """Drafts and computes. Returns the usual seconds, the groups of rows, and what the next step compares with."""
        machine, head = self._machine, self._head
        on_gpu = machine.device is GPU
        limits = DraftLimits(
            256 - len(rows), [DRAFT_MAX] * len(rows), has_streams=True, on_gpu=on_gpu, is_queue_empty=is_queue_empty
        )
        before = head.seconds if head else 0.0
        plan = self._speculator.plan(rows, (len(rows),), machine.cost, limits)
        groups, began = plan.groups if plan else (len(rows),), machine.now
        seconds = (head.seconds - before if head else 0.0) + sum(map(machine.decode, groups))
        changes_for_drafts = groups != last[0] and (plan or last[1])
        if not (on_gpu and changes_for_drafts):  # as `Scheduler.computed`
            machine.observe(groups, machine.now - began)
        if head:
            self._proposer.computed([(sequence, 1 + len(sequence.draft)) for sequence in rows])
        return seconds, groups, (groups, plan is not None)

    def _verify(self, sequence: Seq, completion: list[int]) -> int:
        """Appends the accepted draft tokens and the next one. Returns the number of accepted ones."""
        coming = completion[sequence.n_tokens - sequence.n_prompt :]
        pairs = zip(sequence.draft, coming[:-1], strict=False)
        n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.n_drafted += len(sequence.draft)
        self.n_accepted += n
        sequence.n_computed += 1 + n
        extend(sequence, coming[: n + 1])
        return n


def extend(sequence: Seq, tokens: list[int]) -> None:
    sequence.draft = []
    sequence.tokens[sequence.n_tokens : sequence.n_tokens + len(tokens)] = tokens
    sequence.n_tokens += len(tokens)


# --- texts of a model ------------------------------------------------------------------------------------------------


def texts(engine: BatchInferenceEngine, name: str, n: int) -> list[Text]:
    """Lets the model write the answers to the requests of a workload."""
    workload = TEXT_WORKLOADS[name]
    prompts = [chat_prompt(engine.info, message) for message in workload.prompts(workload.rounds * n, name)]
    params = [
        SamplingParams(
            max_tokens=workload.max_tokens, temperature=workload.temperature, json_schema=workload.schema, seed=i
        )
        for i in range(len(prompts))
    ]
    sequences = [engine.prepare(GenerationRequest(id=str(i), prompt=prompt)) for i, prompt in enumerate(prompts)]
    tokens = [sequence.tokens[: sequence.n_prompt].tolist() for sequence in sequences]
    return [(each, list(result.tokens)) for each, result in zip(tokens, engine.generate(prompts, params), strict=True)]


def best_copies(cases: Sequence[Text]) -> float:
    """Returns the tokens of a step if each draft is the longest copy after an earlier occurrence of the last token."""
    n_steps = n_tokens = 0
    for prompt, completion in cases:
        text, at = prompt + completion, len(prompt)
        while at < len(text):
            starts = [start for start in range(1, at) if text[start - 1] == text[at - 1]]
            longest = max((n_equal(text, start, at) for start in starts), default=0)
            n_steps += 1
            n_tokens += longest + 1
            at += longest + 1
    return n_tokens / n_steps


def n_equal(text: list[int], start: int, at: int) -> int:
    n = 0
    while n < DRAFT_MAX and start + n < at and at + n < len(text) and text[start + n] == text[at + n]:
        n += 1
    return n


def simulate_texts(args: argparse.Namespace) -> None:
    """Prints the gain for each workload and batch size."""
    with BatchInferenceEngine(args.model, n_ctx=16384, n_parallel=16, spec="off") as engine:
        for name in args.workloads:
            cases = texts(engine, name, args.requests or 16)
            print(f"{name}: {best_copies(cases[:8]):.1f} tokens a step with the best copies", flush=True)
            n_tokens = sum(len(completion) for _, completion in cases)
            for size in args.batch_sizes:
                runs = []
                for seed in range(args.disturbed) if args.disturbed else (None,):
                    simulation = Simulation(Machine(TEXTS, seed), None)
                    gain = simulation.run(cases, size)
                    n = simulation.n_drafted
                    runs.append((gain, 100 * n / n_tokens, 100 * simulation.n_accepted / max(1, n)))
                gain, drafted, accepted = (median(column) for column in zip(*runs, strict=True))
                print(f"  B = {size}: {gain:.2f}x, drafted {drafted:.0f}%, accepted {accepted:.0f}%", flush=True)


# --- a draft head ----------------------------------------------------------------------------------------------------


def round_texts(n: int, n_tokens: int, seed: int) -> list[Text]:
    """Returns texts that cycle through all tokens."""
    chance, cycle = Random(seed), [*range(N_VOCAB)] * (2 + (N_PROMPT + n_tokens) // N_VOCAB)
    starts = [chance.randrange(N_VOCAB) for _ in range(n)]
    middle, end = N_PROMPT, N_PROMPT + n_tokens
    return [(cycle[start : start + middle], cycle[start + middle : start + end]) for start in starts]


def best(device: Device, acceptance: float, n: int) -> float:
    """Returns the speedup with the best number of drafts: the head's first decode also reads the accepted tokens."""
    expected = [sum(acceptance**i for i in range(k + 1)) for k in range(DRAFT_MAX)]
    reads = [device.head_s(round(n * tokens)) if k else 0.0 for k, tokens in enumerate(expected)]
    steps = [device.step_s((1 + k) * n) + max(0, k - 1) * device.head_s(n) for k in range(DRAFT_MAX)]
    return max(
        tokens * device.step_s(n) / (step + read) for tokens, step, read in zip(expected, steps, reads, strict=True)
    )


def simulate_heads(args: argparse.Namespace) -> None:
    """Prints the gain for each acceptance and batch size."""
    device = GPU if args.gpu else CPU
    for percent in args.acceptance:
        for n in args.batch_sizes:
            runs = []
            for seed in range(args.runs):
                machine = Machine(device, seed)
                simulation = Simulation(machine, Head(machine, percent / 100, seed))
                runs.append(simulation.run(round_texts((args.requests or 8) * n, args.tokens, seed), n))
            low, middle, high = quantiles(runs, n=4)
            most = best(device, percent / 100, n)
            print(f"{percent}%, B = {n}: {middle:.2f} ({low:.2f} to {high:.2f}), at best {most:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="GGUF file that writes the texts")
    parser.add_argument("-B", dest="batch_sizes", type=numbers, default=[1, 4, 16])
    parser.add_argument("--workloads", type=words, default=list(TEXT_WORKLOADS))
    parser.add_argument("--requests", type=int, help="of a workload, thrice as many of `job` (16); per sequence (8)")
    parser.add_argument("--disturbed", type=int, default=0, metavar="N", help="runs with disturbed steps")
    parser.add_argument("--head", action="store_true", help="drafts of a head")
    parser.add_argument("--acceptance", type=numbers, default=[0, 60, 80, 100], help="percent of the tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of a text, with --head")
    parser.add_argument("--runs", type=int, default=8, help="with --head")
    parser.add_argument("--gpu", action="store_true", help="with --head: the times of an H100")
    args = parser.parse_args()
    if bool(args.model) == args.head:
        parser.error("name a model, or --head")
    (simulate_heads if args.head else simulate_texts)(args)


if __name__ == "__main__":
    main()
