"""Accounting of cells and seq_ids: which are used, and by which running sequences."""

from __future__ import annotations

from heapq import heappush

from cppbatch.config import KvLayout
from cppbatch.engine.cells import Cells, n_held
from cppbatch.engine.kv.memory import Memory
from cppbatch.engine.sequence import Seq


class CellAccounting:
    """The cells and seq_ids of a context. Changes nothing in llama.cpp's memory.

    In the unified layout, all sequences share the cells, and may hold the same ones; in the per-sequence layout, each
    seq_id has its own `n_ctx_seq` cells.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._cells = Cells()
        self._free_all()

    def _free_all(self) -> None:
        """Initialises the accounting for empty memory."""
        memory = self._memory
        self.n_ctx = memory.n_ctx
        self.n_ctx_seq = memory.n_ctx_seq
        self.n_seq_ids = memory.n_seq_ids
        self.unified = memory.kv_unified
        self.has_streams = memory.has_streams
        """Whether each seq_id has its own memory, so that only rows of consecutive seq_ids are computed together."""
        self.n_window = memory.n_window
        """Tokens of the model's sliding window; 0: no window."""
        self.has_states = memory.has_states
        """Whether a sequence has recurrent states."""
        self.n_cells = memory.n_ctx if self.unified else memory.n_ctx_seq * memory.n_seq_ids
        self._cells.n_used = 0
        # Heaps: the lowest free seq_id is used first, so that used seq_ids are adjacent. Only the first n_seq_max may
        # be in a batch; the others can hold cells of cached prefixes.
        self._free_ids = list(range(memory.n_seq_max))
        self._cache_only_ids = list(range(memory.n_seq_max, self.n_seq_ids))
        self.running: dict[int, Seq] = {}
        """The running sequences by seq_id."""

    @property
    def n_used(self) -> int:
        """Cells of running sequences; shared ones count once."""
        return n_held(sequence.cells for sequence in self.running.values())

    @property
    def n_cached(self) -> int:
        """Cells held only by cached prefixes; freed when needed."""
        return self._cells.n_used - self.n_used

    @property
    def n_free(self) -> int:
        """Cells not held by any sequence or cached prefix."""
        return self.n_cells - self._cells.n_used

    @property
    def n_free_ids(self) -> int:
        """seq_ids not held by a running sequence or cached prefix."""
        return len(self._free_ids) + len(self._cache_only_ids)

    def spare_ids(self) -> list[int]:
        """Free seq_ids that may be in a batch, ascending."""
        return sorted(self._free_ids)

    @property
    def layout(self) -> KvLayout:
        """The current layout."""
        return "unified" if self.unified else "per-sequence"

    def _free_id(self, seq_id: int) -> None:
        heappush(self._free_ids if seq_id < self._memory.n_seq_max else self._cache_only_ids, seq_id)

    def _free_cells_and_id(self, sequence: Seq) -> None:
        self._cells.free(sequence.cells)
        sequence.cells = None
        del self.running[sequence.seq_id]
        self._free_id(sequence.seq_id)
        sequence.seq_id = -1
