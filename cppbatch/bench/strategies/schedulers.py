"""Schedulers for comparison with the continuous one: static batches, and one sequence per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import numpy as np

from cppbatch.engine.kv.batch_order import in_batch_order
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.scheduler import Scheduler
from cppbatch.engine.sequence import Seq, SeqStatus
from cppbatch.engine.step_plan import Scheduled, StepPlan


class Padding:
    """A sequence of dummy tokens. They cost as much as prompt tokens and are dropped after the step."""

    def __init__(self, kv: KVPool) -> None:
        self._kv = kv
        # One token longer than can be computed, so that it never requests logits.
        request = GenerationRequest(id="padding", prompt=[0], cache_prompt=False)
        self._sequence = Seq(request, np.zeros(kv.n_ctx + 1, np.int32), max_new=0, seed=0, now=0.0)

    def scheduled(self, n: int, adapters: AdapterSet) -> Scheduled:
        """Returns `n` tokens for the next step. A seq_id and `n` cells must be free."""
        self._sequence.adapters = adapters
        self._kv.admit(self._sequence)
        return self._sequence, n

    def drop(self) -> None:
        """Frees the cells of the last step."""
        if self._sequence.seq_id >= 0:
            self._kv.release(self._sequence, keep=False)
            self._sequence.n_computed = 0

    def restart(self) -> None:
        """Resets the sequence after the KV pool was cleared."""
        self._sequence.restarted()


class StaticScheduler(Scheduler):
    """Starts a batch when `n_parallel` requests wait or the first one has waited for `max_wait_s`. Requests cannot join
    it later.

    All prompts of the batch are computed, then all its sequences decode. The slot of an ended sequence stays empty
    until the batch ends, at no cost. With a `bucket`, it is computed until then, as required without ragged batches,
    and prompts are padded to the next multiple of `bucket` tokens that holds the longest. `is_by_length`: all prompts
    of a batch have the same multiple, which reduces padding, but a batch may have to wait longer until it is full.
    """

    def __init__(
        self,
        kv: KVPool,
        *,
        max_wait_s: float,
        bucket: int = 0,
        is_by_length: bool = False,
        clock: Callable[[], float] = perf_counter,
        **settings: Any,
    ) -> None:
        super().__init__(kv, **settings)
        self._max_wait_s, self._bucket, self._clock = max_wait_s, bucket, clock
        self._is_by_length = is_by_length
        self._batch: list[Seq] = []
        """The sequences of the batch that have not ended."""
        self._batch_size = 0
        """Sequences at the start of the batch."""
        self._n_padding = 0
        """Padding tokens still to be computed, before the prompts."""
        self._padding = Padding(kv)

    def plan(self) -> StepPlan:
        """Plans the next step, as `Scheduler.plan`. The plan is empty while a batch is being collected."""
        self._padding.drop()
        if not self._batch and (due := self._due_batch()):
            self._batch = due
            self._batch_size = len(self._batch)
            self._n_padding = padding_tokens([s.n_tokens for s in self._batch], self._bucket)
        return super().plan()

    def remove(self, sequence: Seq) -> None:
        """Removes an ended sequence. Its slot stays taken until the batch ends."""
        super().remove(sequence)
        if sequence in self._batch:
            self._batch.remove(sequence)
            if not self._batch:
                self._padding.drop()

    def restart(self, sequences: Iterable[Seq]) -> None:
        """Makes these sequences wait again, as the same batch."""
        super().restart(sequences)
        self._padding.restart()

    def _due_batch(self) -> list[Seq]:
        """The sequences of the next batch: a full one, or that of the first sequence if it has waited long enough."""
        by_length: dict[int, list[Seq]] = {}
        for sequence in self.waiting:
            length = round_up(sequence.n_tokens, self._bucket) if self._is_by_length else 0
            by_length.setdefault(length, []).append(sequence)
        batches = [each[: self.n_parallel] for each in by_length.values()]
        is_late = bool(self.waiting) and self._clock() - self.waiting[0].arrived_at >= self._max_wait_s
        if is_late:
            return batches[0]
        return next((batch for batch in batches if len(batch) == self.n_parallel), [])

    def _admit(self) -> list[Seq]:
        if self.running or self._n_padding:
            return []
        for sequence in self._batch:
            self.waiting.remove(sequence)
            self._kv.admit(sequence)
        self.running = self._batch.copy()
        return self._batch.copy()

    def _choose(self, plan: StepPlan) -> None:
        if not self._batch:
            return
        plan.adapters = self._batch[0].adapters
        if self._n_padding:
            n = min(self._n_padding, self._step_tokens, max(s.n_tokens for s in self._batch))
            self._n_padding -= n
            plan.scheduled = [self._padding.scheduled(n, plan.adapters)]
            return
        ready = [s for s in self.running if not s.moving]
        plan.scheduled = in_batch_order([], self._prompts(ready))
        if not plan.scheduled:
            rows = [(s, 1) for s in ready]
            n_ended = self._batch_size - len(self._batch)
            padding = [self._padding.scheduled(n_ended, plan.adapters)] if self._bucket and rows and n_ended else []
            plan.scheduled, plan.n_decode = in_batch_order(rows, padding), len(rows)
            plan.row_groups = (len(rows),)

    def _prompts(self, ready: list[Seq]) -> list[Scheduled]:
        n_left, prefill = self._step_tokens, []
        if not self._kv.ensure_free(n_left):
            n_left = min(n_left, self._kv.n_free)
        for sequence in ready:
            n = min(n_left, sequence.n_pending)
            if sequence.status is SeqStatus.PREFILL and n > 0:
                prefill.append((sequence, n))
                n_left -= n
        return prefill


def padding_tokens(lengths: list[int], bucket: int) -> int:
    """Returns the tokens that pad these lengths to the next multiple of `bucket` that holds the longest."""
    if not bucket:
        return 0
    return len(lengths) * round_up(max(lengths), bucket) - sum(lengths)


def round_up(n: int, bucket: int) -> int:
    """Rounds up to a multiple of `bucket`."""
    return -(-n // bucket) * bucket


# --- serial schedulers -----------------------------------------------------------------------------------------------


class SequentialScheduler(Scheduler):
    """Runs one request after another: the engine's own policy with `n_parallel=1`."""

    def __init__(self, kv: KVPool, *, n_parallel: int, **settings: Any) -> None:
        del n_parallel
        super().__init__(kv, n_parallel=1, **settings)


class ConcurrentScheduler(Scheduler):
    """Interleaves requests without batching: each step computes one sequence's prompt or next token, in turn.

    Threads that share one model do the same: all requests advance, without any gain from batching.
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
        plan.scheduled, plan.adapters = [(sequence, n)], sequence.adapters
        plan.n_decode = int(sequence.status is SeqStatus.DECODE)
        plan.row_groups = (1,) * plan.n_decode
