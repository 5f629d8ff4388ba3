"""Policy: which sequences compute how many tokens in the next step. Touches nothing native."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.sequence import Sequence, Status
from cppbatch.engine.step_budget import StepBudget

_MOST_HEADROOM = 32  # tokens a running sequence may grow before the next admission is judged too early


@dataclass(slots=True)
class StepPlan:
    """One step: which sequences compute how many of their pending tokens.

    In order of seq_id: with streams of their own (per-sequence layout, recurrent models), llama.cpp computes only
    consecutive seq_ids together, and a batch in any other order falls apart into many small ones.
    """

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with the number of pending tokens to compute."""
    admitted: list[Sequence] = field(default_factory=list)
    n_decode: int = 0
    """How many of the chunks are decoding; the others prefill."""
    n_tokens: int = 0

    def outputs(self) -> list[Sequence]:
        """The sequences that get logits: those with nothing pending after this step, in the batch's order."""
        return [sequence for sequence, n in self.chunks if n == sequence.n_pending]


class Scheduler:
    """First come, first served: admission in order of arrival, decode rows before prefill, prefill in order.

    A sequence is admitted when the cells for its tokens are free, with headroom for those that run to grow. When they
    have grown into each other all the same, the latest arrived gives up its cells, and is the first to resume. So the
    oldest always goes on, and nobody starves. The head of the queue waits for its cells, and those behind it wait with
    it, so a large request is not starved by small ones.
    """

    def __init__(self, kv: KVPool, *, step_tokens: int, target_step_s: float | None = None) -> None:
        self._kv = kv
        self._budget = StepBudget(step_tokens, target_step_s)
        self._headroom = max(1, min(_MOST_HEADROOM, kv.n_ctx // (4 * kv.n_seq_ids)))
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
        if sequence.status in (Status.WAITING, Status.SWAPPED):
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    def plan(self) -> StepPlan:
        """The next step. The caller applies it to the memory, then computes every chunk or removes its sequence."""
        plan = StepPlan()
        if not self._make_room():
            plan.admitted = self._admit()
        decode = [
            s for s in self.running if s.status is Status.DECODE and not s.saved
        ]  # saved: it returns in this step
        plan.chunks = [(sequence, 1) for sequence in decode]
        plan.n_decode = len(decode)
        budget = self._budget.prefill_tokens(plan.n_decode)
        free = self._kv.n_free - plan.n_decode
        for sequence in self.running:
            n = min(budget, free, sequence.n_pending)
            if sequence.status is Status.PREFILL and n > 0 and not sequence.saved:
                plan.chunks.append((sequence, n))
                budget -= n
                free -= n
        plan.chunks.sort(key=lambda chunk: chunk[0].seq_id)
        plan.n_tokens = sum(n for _, n in plan.chunks)
        return plan

    def computed(self, plan: StepPlan, seconds: float) -> None:
        """Takes note of how long a step took."""
        self._budget.observe(plan.n_decode, plan.n_tokens - plan.n_decode, seconds)

    def _make_room(self) -> bool:
        """Preempts until every decoding sequence can grow, or, if none decodes, until the first one can go on."""
        preempted = False
        while self.running:
            decoding = sum(s.status is Status.DECODE for s in self.running)
            if self._kv.n_free >= max(1, decoding):
                break
            latest = self.running.pop()
            self._kv.preempt(latest)
            self.waiting.appendleft(latest)
            preempted = True
        return preempted

    def _admit(self) -> list[Sequence]:
        """Takes in what fits. `running` stays in order of arrival: those who wait came later, or were the latest."""
        admitted = []
        spare = self._kv.n_free - sum(s.n_pending + self._growth(s) for s in self.running)
        while self.waiting and self._kv.n_free_ids:
            head = self.waiting[0]
            spare -= head.n_tokens + self._growth(head)
            if self._kv.unified and spare < 0 and self.running:
                break
            self.running.append(self.waiting.popleft())
            self._kv.admit(head)
            admitted.append(head)
        return admitted

    def _growth(self, sequence: Sequence) -> int:
        """Cells to keep free for it, so that it is not preempted as soon as it runs."""
        return min(self._headroom, sequence.n_left)
