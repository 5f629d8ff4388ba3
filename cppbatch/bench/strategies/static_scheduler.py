"""Batches that are collected, run, and over when their last request is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import numpy as np

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.scheduler import Chunk, Scheduler, StepPlan, in_batch_order
from cppbatch.engine.sequence import Seq, SeqStatus


class Padding:
    """A sequence that nobody waits for. What is computed of it costs what a prompt does, and is dropped again."""

    def __init__(self, kv: KVPool) -> None:
        self._kv = kv
        # With one token more than can be computed, so that it never comes to want logits.
        request = GenerationRequest(id="padding", prompt=[0], cache_prompt=False)
        self._sequence = Seq(request, np.zeros(kv.n_ctx + 1, np.int32), max_new=0, seed=0, now=0.0)

    def chunk(self, n: int, adapters: AdapterSet) -> Chunk:
        """So many tokens for the next step. A seq_id and that many cells must be free."""
        self._sequence.adapters = adapters
        self._kv.admit(self._sequence)
        return self._sequence, n

    def drop(self) -> None:
        """Frees what the last step computed."""
        if self._sequence.seq_id >= 0:
            self._kv.release(self._sequence, keep=False)

    def restart(self) -> None:
        """The pool has forgotten it."""
        self._sequence.restarted()


class StaticScheduler(Scheduler):
    """A batch starts when all places are taken or its first request has waited for `max_wait_s`. Nobody joins it.

    All its prompts are read, then all of it decodes. The place of one that has ended stays empty until the batch is
    over, but costs nothing. With a `bucket` it does, as it must without ragged batches: prompts are padded to the next
    multiple of `bucket` tokens that holds the longest, and rows that have ended are computed until the last one ends.
    """

    def __init__(
        self,
        kv: KVPool,
        *,
        max_wait_s: float,
        bucket: int = 0,
        clock: Callable[[], float] = perf_counter,
        **settings: Any,
    ) -> None:
        super().__init__(kv, **settings)
        self._max_wait_s, self._bucket, self._clock = max_wait_s, bucket, clock
        self._batch: list[Seq] = []
        """Those of it that have not ended."""
        self._places = 0
        """How many it began with."""
        self._owed = 0
        """Padding that is to be computed before its prompts are."""
        self._padding = Padding(kv)

    def plan(self) -> StepPlan:
        """The next step; see `Scheduler.plan`. One without chunks while a batch is being collected."""
        self._padding.drop()
        if not self._batch and self._is_due():
            self._batch = self.waiting[: self._n_parallel]
            self._places = len(self._batch)
            self._owed = padding_tokens([s.n_tokens for s in self._batch], self._bucket)
        return super().plan()

    def remove(self, sequence: Seq) -> None:
        """Forgets a sequence that has ended; its place is not free before those of the others are."""
        super().remove(sequence)
        if sequence in self._batch:
            self._batch.remove(sequence)
            if not self._batch:
                self._padding.drop()

    def restart(self, sequences: Iterable[Seq]) -> None:
        """All of these wait again; the batch stays the same."""
        super().restart(sequences)
        self._padding.restart()

    def _is_due(self) -> bool:
        if len(self.waiting) >= self._n_parallel:
            return True
        return bool(self.waiting) and self._clock() - self.waiting[0].arrived_at >= self._max_wait_s

    def _admit(self) -> list[Seq]:
        if self.running or self._owed:
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
        if self._owed:
            n = min(self._owed, self._step_tokens, max(s.n_tokens for s in self._batch))
            self._owed -= n
            plan.chunks = [self._padding.chunk(n, plan.adapters)]
            return
        ready = [s for s in self.running if not s.moving]
        plan.chunks = in_batch_order([], self._prompts(ready))
        if not plan.chunks:
            rows = [(s, 1) for s in ready]
            n_ended = self._places - len(self._batch)
            padding = [self._padding.chunk(n_ended, plan.adapters)] if self._bucket and rows and n_ended else []
            plan.chunks, plan.n_decode = in_batch_order(rows, padding), len(rows)

    def _prompts(self, ready: list[Seq]) -> list[Chunk]:
        room, chunks = self._step_tokens, []
        if not self._kv.ensure_free(room):
            room = min(room, self._kv.n_free)
        for sequence in ready:
            n = min(room, sequence.n_pending)
            if sequence.status is SeqStatus.PREFILL and n > 0:
                chunks.append((sequence, n))
                room -= n
        return chunks


def padding_tokens(lengths: list[int], bucket: int) -> int:
    """Tokens that fill prompts of these lengths up to the next multiple of `bucket` that holds the longest."""
    if not bucket:
        return 0
    return len(lengths) * round_up(max(lengths), bucket) - sum(lengths)


def round_up(n: int, bucket: int) -> int:
    """The next multiple of `bucket`."""
    return -(-n // bucket) * bucket
