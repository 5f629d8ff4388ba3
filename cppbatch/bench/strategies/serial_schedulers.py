"""Schedulers without batching: one sequence in each step."""

from __future__ import annotations

from typing import Any

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.scheduler import Scheduler, StepPlan
from cppbatch.engine.sequence import SeqStatus


class SequentialScheduler(Scheduler):
    """Runs one request after the other: the engine's own policy with `n_parallel=1`."""

    def __init__(self, kv: KVPool, *, n_parallel: int, **settings: Any) -> None:
        del n_parallel
        super().__init__(kv, n_parallel=1, **settings)


class ConcurrentScheduler(Scheduler):
    """Interleaves requests without batching: each step computes one sequence's prompt or next token, in turn.

    This is what threads over one model do: all requests advance, and none gains from the others.
    """

    _last = (float("-inf"), 0)  # rank of the sequence of the previous step

    def _choose(self, plan: StepPlan) -> None:
        ready = [sequence for sequence in self.running if not sequence.moving]
        if not ready:
            return
        sequence = next((s for s in ready if s.rank > self._last), ready[0])
        self._last = sequence.rank
        n = min(sequence.n_pending, self._step_tokens)
        if not self._kv.ensure_free(n):
            n = self._kv.n_free
        plan.chunks, plan.adapters = [(sequence, n)], sequence.adapters
        plan.n_decode = int(sequence.status is SeqStatus.DECODE)
        plan.row_groups = (1,) * plan.n_decode
