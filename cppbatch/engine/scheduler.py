"""Policy: which sequences compute how many tokens in the next step. Touches nothing native."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.sequence import Sequence, Status


@dataclass(slots=True)
class StepPlan:
    """One step: which sequences compute how many of their pending tokens.

    In order of seq_id: with streams of their own (per-sequence layout, recurrent models), llama.cpp computes only
    consecutive seq_ids together, and a batch in any other order falls apart into many small ones.
    """

    admitted: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with the number of pending tokens to compute."""
    n_decode: int = 0
    """How many of them are decoding; the others prefill."""
    n_tokens: int = 0

    def outputs(self) -> list[Sequence]:
        """The sequences that get logits: those with nothing pending after this step, in the batch's order."""
        return [sequence for sequence, n in self.chunks if n == sequence.n_pending]


class Scheduler:
    """First come, first served: admission in order of arrival, decode rows before prefill, prefill in order.

    The head of the queue waits until its cells are free, and those behind it wait with it, so a large request is
    never starved by small ones.
    """

    def __init__(self, kv: KVPool, *, step_tokens: int) -> None:
        self._kv = kv
        self._step_tokens = step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended, wherever it is."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    def plan(self) -> StepPlan:
        """The next step. Admits what fits; the caller computes every entry or removes its sequence."""
        admitted = self._admit()
        chunks = [(sequence, 1) for sequence in self.running if sequence.status is Status.DECODE]
        n_decode = len(chunks)
        budget = self._step_tokens - n_decode
        for sequence in self.running:
            if sequence.status is Status.PREFILL and budget > 0:
                n = min(budget, sequence.n_pending)
                chunks.append((sequence, n))
                budget -= n
        chunks.sort(key=lambda chunk: chunk[0].seq_id)
        return StepPlan(admitted, chunks, n_decode, self._step_tokens - budget)

    def _admit(self) -> list[Sequence]:
        admitted = []
        while self.waiting and self._kv.admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            sequence.status = Status.PREFILL
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted
