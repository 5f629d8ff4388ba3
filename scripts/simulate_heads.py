"""What a draft head (MTP) gains at a known acceptance, without the noise of a machine: given step times.

Usage: python scripts/simulate_heads.py [-B 1,4,16] [--acceptance 0,60,80,100] [--tokens 64] [--requests 8] [--runs 8]
[--gpu]

The engine's `Speculator` and `HeadProposer` draft for texts in simulated steps. The head drafts the next token, except
for the share of tokens that it misses. The target and the head take the times that `scripts/bench_draft_head.py`'s
model takes (1.1 GB, Q8_0). The engine learns the times beside another program: 4% of the decodes seem to take 2 to 8
times as long. --gpu: the times of an H100, where the first decode of each size takes longer, and so does a step with
another number of rows than the last one. Prints the speedup of decode: medians of the runs with their quartiles, and at
best, if the number of draft tokens was always the best one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from random import Random
from statistics import quantiles
from typing import Any

import numpy as np

from cppbatch import GenerationRequest
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.head_proposer import HeadProposer
from cppbatch.engine.speculation.speculator import DraftLimits, Speculator
from cppbatch.engine.step_cost import Groups, StepCost
from cppbatch.llama import Batch, HeadBatch

DRAFT_MAX = 16
N_VOCAB = 512
N_PROMPT = 32


@dataclass(frozen=True)
class Device:
    """Where the decodes run."""

    step_ms: dict[int, float]
    """By number of rows."""
    prompt_token_s: float
    head: float
    """The time of a decode of the head, relative to one of the model with as many rows."""
    head_ms: float = 0.0
    """In addition to that."""
    first_ms: float = 0.0
    """In addition, for the first decode of a size."""
    other_rows_ms: float = 0.0
    """In addition, for a step with another number of rows than the last one."""

    def step_s(self, n: int) -> float:
        """Seconds of a step of this number of rows."""
        return float(np.interp(n, list(self.step_ms), list(self.step_ms.values()))) / 1000

    def head_s(self, n: int) -> float:
        """The same of the head."""
        return self.head * self.step_s(n) + self.head_ms / 1000


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
    """The times of decodes, and the clock. The engine measures both."""

    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        self._random = Random(seed)
        self._seen: set[tuple[bool, int]] = set()
        self._last = 0  # rows of the last step
        self.now = 0.0

    def clock(self) -> float:
        """The time in seconds."""
        return self.now

    def decode(self, n: int, *, head: bool = False) -> float:
        """Computes `n` rows. Returns their usual time; the clock may advance more."""
        device = self.device
        seconds = device.head_s(n) if head else device.step_s(n)
        disturbed = self._random.uniform(2, 8) if self._random.random() < 0.04 else 1.0
        size = head, n if n <= 8 else 8 + n.bit_length()
        if size not in self._seen:
            self.now += device.first_ms / 1000
        self._seen.add(size)
        if not head:
            seconds += device.other_rows_ms / 1000 if n != self._last else 0.0
            self._last = n
        self.now += seconds * disturbed * self._random.lognormvariate(0, 0.05)
        return seconds


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


def simulate(device: Device, acceptance: float, batch_size: int, texts: tuple[int, int], seed: int) -> float:
    """The speedup of decode. `texts`: their number, and their tokens."""
    n_requests, n_tokens = texts
    machine, chance = Machine(device, seed), Random(seed)
    prompt_s, on_gpu = N_PROMPT * device.prompt_token_s, device is GPU
    head = Head(machine, acceptance, seed)
    proposer = HeadProposer(head, lambda n: np.zeros((n, head.n_row), np.float32), 1 << 16, clock=machine.clock)
    speculator, cost = Speculator([proposer], DRAFT_MAX, wall=machine.clock), StepCost()
    cost.observe_prompt(N_PROMPT, prompt_s)
    last_groups: Groups = ()
    had_drafts = False
    waiting, running = n_requests, list[Seq]()
    seconds = plain_seconds = 0.0
    while waiting or running:
        while waiting and len(running) < batch_size:
            sequence = new_sequence(str(waiting), chance.randrange(N_VOCAB), n_tokens)
            sequence.seq_id = min(set(range(batch_size)) - {other.seq_id for other in running})
            machine.now += prompt_s
            proposer.computed([(sequence, N_PROMPT)])
            sequence.n_computed = N_PROMPT
            extend(sequence, 1)
            running.append(sequence)
            waiting -= 1
        rows = sorted(running, key=lambda each: each.seq_id)
        limits = DraftLimits(
            256 - len(rows), [DRAFT_MAX] * len(rows), has_streams=True, on_gpu=on_gpu, is_queue_empty=not waiting
        )
        before = head.seconds
        plan = speculator.plan(rows, (len(rows),), cost, limits)
        groups, began = plan.groups if plan else (len(rows),), machine.now
        seconds += head.seconds - before + sum(map(machine.decode, groups))
        changes_for_drafts = groups != last_groups and (plan or had_drafts)
        if not (on_gpu and changes_for_drafts):  # as `Scheduler.computed`
            cost.observe_rows(groups, machine.now - began)
        last_groups, had_drafts = groups, plan is not None
        proposer.computed([(sequence, 1 + len(sequence.draft)) for sequence in rows])
        accepted: dict[Seq, int] = {}
        for sequence in rows:
            pairs = zip(sequence.draft, following(sequence), strict=False)
            n_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            n = accepted[sequence] = min(n_right, N_PROMPT + n_tokens - sequence.n_tokens - 1)
            sequence.draft = []
            sequence.n_computed += 1 + n
            extend(sequence, 1 + n)
            plain_seconds += (1 + n) * device.step_s(len(rows)) / len(rows)
        if plan:
            speculator.verified(accepted, 0.0)
        for sequence in rows:
            if sequence.n_tokens >= N_PROMPT + n_tokens:
                speculator.finished(sequence)
                running.remove(sequence)
    return plain_seconds / seconds


def new_sequence(name: str, first: int, n_tokens: int) -> Seq:
    prompt = (np.arange(first, first + N_PROMPT) % N_VOCAB).astype(np.int32)
    request = GenerationRequest(id=name, prompt=prompt.tolist(), cache_prompt=False)
    return Seq(request, prompt, max_new=n_tokens + DRAFT_MAX, seed=0, now=0.0)


def following(sequence: Seq) -> Iterator[int]:
    """The next tokens of its text."""
    token = int(sequence.tokens[sequence.n_tokens - 1])
    while True:
        token = (token + 1) % N_VOCAB
        yield token


def extend(sequence: Seq, n: int) -> None:
    """Appends the next `n` tokens."""
    tokens = list(islice(following(sequence), n))
    sequence.tokens[sequence.n_tokens : sequence.n_tokens + n] = tokens
    sequence.n_tokens += n


def best(device: Device, acceptance: float, n: int) -> float:
    """The speedup with the best number of draft tokens: the first decode of the head also reads the accepted tokens."""
    expected = [sum(acceptance**i for i in range(k + 1)) for k in range(DRAFT_MAX)]
    reads = [device.head_s(round(n * tokens)) if k else 0.0 for k, tokens in enumerate(expected)]
    steps = [device.step_s((1 + k) * n) + max(0, k - 1) * device.head_s(n) for k in range(DRAFT_MAX)]
    return max(
        tokens * device.step_s(n) / (step + read) for tokens, step, read in zip(expected, steps, reads, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-B", dest="batch_sizes", default="1,4,16")
    parser.add_argument("--acceptance", default="0,60,80,100", help="percent of the tokens")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8, help="of each sequence of the batch")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    device = GPU if args.gpu else CPU
    for percent in map(int, args.acceptance.split(",")):
        for n in map(int, args.batch_sizes.split(",")):
            acceptance = percent / 100
            runs = [simulate(device, acceptance, n, (args.requests * n, args.tokens), i) for i in range(args.runs)]
            low, middle, high = quantiles(runs, n=4)
            most = best(device, acceptance, n)
            print(f"{percent}%, B = {n}: {middle:.2f} ({low:.2f} to {high:.2f}), at best {most:.2f}", flush=True)


if __name__ == "__main__":
    main()
