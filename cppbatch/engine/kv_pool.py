"""Who holds which cells and seq_ids of the KV cache."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol

from cppbatch.engine.sequence import Sequence


class Memory(Protocol):
    """The part of a llama.cpp context that holds keys and values."""

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool: ...


class KVPool:
    """Cells and seq_ids of one context.

    A sequence gets a seq_id and all the cells it may come to need at admission, so a running sequence never finds
    the cache full. `unified`: one pool of `n_ctx` cells; otherwise each seq_id has `n_ctx_seq` cells of its own.
    """

    def __init__(self, memory: Memory, *, n_ctx: int, n_ctx_seq: int, n_seq_ids: int, unified: bool) -> None:
        self._memory = memory
        self.n_ctx = n_ctx
        self.n_seq_ids = n_seq_ids
        self.most_per_sequence = n_ctx if unified else n_ctx_seq
        """Cells that one sequence can get."""
        self._unified = unified
        self._free_ids = list(range(n_seq_ids))  # a heap: the lowest is given first, so the ids in use stay close
        self._holders: dict[int, Sequence] = {}
        self.n_reserved = 0

    @property
    def n_used(self) -> int:
        """Cells that hold a computed token now."""
        return sum(sequence.n_computed for sequence in self._holders.values())

    @property
    def n_free_ids(self) -> int:
        """seq_ids that no sequence has."""
        return len(self._free_ids)

    def admit(self, sequence: Sequence) -> bool:
        """Gives the sequence a seq_id and reserves its cells; False when there is no room now."""
        need = sequence.most_cells
        if not self._free_ids or (self._unified and self.n_reserved + need > self.n_ctx):
            return False
        sequence.seq_id = heappop(self._free_ids)
        self._holders[sequence.seq_id] = sequence
        self.n_reserved += need
        return True

    def release(self, sequence: Sequence) -> None:
        """Takes cells and seq_id back at once. A sequence that holds none is left as it is."""
        if sequence.seq_id < 0:
            return
        self._memory.remove(sequence.seq_id)
        del self._holders[sequence.seq_id]
        heappush(self._free_ids, sequence.seq_id)
        self.n_reserved -= sequence.most_cells
        sequence.seq_id = -1
        sequence.n_computed = 0

    def check(self) -> None:
        """Raises AssertionError when the books do not add up (DESIGN.md's invariants)."""
        held = list(self._holders)
        assert sorted(held + self._free_ids) == list(range(self.n_seq_ids)), "a seq_id is lost or held twice"
        assert all(s.seq_id == i for i, s in self._holders.items()), "a sequence has another's seq_id"
        assert self.n_reserved == sum(s.most_cells for s in self._holders.values()), "reserved cells do not add up"
        assert self.n_used <= self.n_reserved, "more cells are used than were reserved"
        assert not self._unified or self.n_reserved <= self.n_ctx, "more cells are reserved than there are"
        assert all(s.most_cells <= self.most_per_sequence for s in self._holders.values()), "a sequence is too long"
