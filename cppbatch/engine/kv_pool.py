"""Who holds which cells and seq_ids of the KV cache, and what is swapped out to host memory."""

from __future__ import annotations

import logging
from heapq import heappop, heappush
from typing import Any, Protocol

from cppbatch.engine.sequence import SavedState, Sequence, Status
from cppbatch.errors import LlamaError

log = logging.getLogger("cppbatch.engine")


class Memory(Protocol):
    """The part of a llama.cpp context that holds keys and values."""

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool: ...
    def save_sequence(self, seq_id: int) -> SavedState: ...
    def restore_sequence(self, seq_id: int, state: Any) -> None: ...  # one that `save_sequence` gave


class KVPool:
    """Cells and seq_ids of one context.

    `unified`: one pool of `n_ctx` cells; otherwise each seq_id has `n_ctx_seq` cells of its own. Planning a step
    (`admit`, `preempt`) changes the books only; `apply` then moves the memory. `swap_bytes` bounds the host memory
    for sequences that had to give up their cells; beyond it they are computed again when they resume.
    """

    def __init__(
        self, memory: Memory, *, n_ctx: int, n_ctx_seq: int, n_seq_ids: int, unified: bool, swap_bytes: int
    ) -> None:
        self._memory = memory
        self.n_ctx = n_ctx
        self.n_seq_ids = n_seq_ids
        self._n_cells = n_ctx if unified else n_ctx_seq * n_seq_ids
        self.unified = unified
        self._swap_bytes = swap_bytes
        self.swapped_bytes = 0
        """Host memory that holds swapped-out sequences now."""
        self.n_swaps = self.n_recomputes = 0
        """Sequences that gave up their cells so far: to host memory, or to be computed again."""
        self._free_ids = list(range(n_seq_ids))  # a heap: the lowest is given first, so the ids in use stay close
        self._holders: dict[int, Sequence] = {}
        self._leaving: list[tuple[int, Sequence]] = []
        self._returning: list[Sequence] = []

    @property
    def n_used(self) -> int:
        """Cells that hold a computed token."""
        return sum(sequence.n_computed for sequence in self._holders.values())

    @property
    def n_free(self) -> int:
        """Cells that hold nothing."""
        return self._n_cells - self.n_used

    @property
    def n_free_ids(self) -> int:
        """seq_ids that no sequence has."""
        return len(self._free_ids)

    def admit(self, sequence: Sequence) -> None:
        """Gives a sequence a seq_id; a swapped-out one gets its memory back in `apply`. There must be a free id."""
        sequence.seq_id = heappop(self._free_ids)
        self._holders[sequence.seq_id] = sequence
        if sequence.status is Status.SWAPPED:
            self._returning.append(sequence)
        only_one_pending = sequence.n_computed > 0 and sequence.n_pending == 1
        sequence.status = Status.DECODE if only_one_pending else Status.PREFILL

    def preempt(self, sequence: Sequence) -> None:
        """Takes cells and seq_id from a running sequence, which keeps its tokens and resumes later."""
        self._leaving.append((sequence.seq_id, sequence))
        self._give_up_id(sequence)
        sequence.status = Status.SWAPPED

    def apply(self) -> None:
        """Carries out what was planned: first those who leave, then those who return."""
        for seq_id, sequence in self._leaving:
            self._swap_out(seq_id, sequence)
        for sequence in self._returning:
            self._swap_in(sequence)
        self._leaving.clear()
        self._returning.clear()

    def release(self, sequence: Sequence) -> None:
        """Takes everything a finished sequence holds, at once."""
        if sequence.seq_id >= 0:
            self._memory.remove(sequence.seq_id)
            self._give_up_id(sequence)
        self._drop_saved(sequence)
        sequence.n_computed = 0

    def _give_up_id(self, sequence: Sequence) -> None:
        del self._holders[sequence.seq_id]
        heappush(self._free_ids, sequence.seq_id)
        sequence.seq_id = -1

    def _swap_out(self, seq_id: int, sequence: Sequence) -> None:
        room = self._swap_bytes - self.swapped_bytes
        saved = self._memory.save_sequence(seq_id) if room > 0 and sequence.n_computed else None
        self._memory.remove(seq_id)
        if saved and saved.n_bytes <= room:
            sequence.saved = saved
            self.swapped_bytes += saved.n_bytes
            self.n_swaps += 1
        else:
            self._start_over(sequence, Status.WAITING)

    def _swap_in(self, sequence: Sequence) -> None:
        assert sequence.saved is not None
        try:
            self._memory.restore_sequence(sequence.seq_id, sequence.saved)
        except LlamaError as error:
            log.warning("%s is computed again: %s", sequence.id, error)
            self._start_over(sequence, Status.PREFILL)
        self._drop_saved(sequence)

    def _start_over(self, sequence: Sequence, status: Status) -> None:
        sequence.n_computed = 0
        sequence.status = status
        self.n_recomputes += 1

    def _drop_saved(self, sequence: Sequence) -> None:
        if sequence.saved:
            self.swapped_bytes -= sequence.saved.n_bytes
            sequence.saved = None

    def check(self) -> None:
        """Raises AssertionError when the books do not add up (DESIGN.md's invariants)."""
        held = list(self._holders)
        assert sorted(held + self._free_ids) == list(range(self.n_seq_ids)), "a seq_id is lost or held twice"
        assert all(s.seq_id == i for i, s in self._holders.items()), "a sequence has another's seq_id"
        assert 0 <= self.n_free <= self._n_cells, f"{self.n_used} cells are used of {self._n_cells}"
        assert not self._leaving, "a preempted sequence still holds its memory"
        assert 0 <= self.swapped_bytes <= self._swap_bytes, f"{self.swapped_bytes} bytes are swapped out"
