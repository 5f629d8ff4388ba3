"""Who holds which cells and seq_ids of the KV cache, and what lies in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, Protocol

from cppbatch.config import Sharing
from cppbatch.engine.cells import Cells, n_held, n_shared
from cppbatch.engine.kv_invariants import check_invariants, dump_cells, require
from cppbatch.engine.prefix_cache import CachedPrefix, Match, PrefixCache
from cppbatch.engine.sequence import SavedState, Seq
from cppbatch.errors import LlamaError

log = logging.getLogger("cppbatch.engine")

CACHED_SHARE = 0.25
_LEAST_CACHED = 20  # tokens: a shorter prefix is as soon computed as taken

OUT_OF_MEMORY = (LlamaError, MemoryError)


class Memory(Protocol):
    """The part of a llama.cpp context that holds keys and values."""

    n_ctx: int
    n_ctx_seq: int
    n_seq_max: int
    n_seq_ids: int
    kv_unified: bool

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool: ...
    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None: ...
    def clear(self) -> None: ...
    def last_position(self, seq_id: int) -> int: ...
    def save_sequence(self, seq_id: int) -> SavedState: ...
    def restore_sequence(self, seq_id: int, state: Any) -> None: ...  # one that `save_sequence` gave


class KVPool:
    """Cells and seq_ids of one context.

    In the unified layout all sequences share the cells, and may hold the same ones; otherwise each seq_id has
    `n_ctx_seq` of its own. Planning a step (`admit`, `preempt`, `evict`) changes the books and notes the moves; `apply`
    then makes them, in that order. `swap_bytes` bounds the host memory for sequences that had to give up their cells;
    beyond it they are computed again when they resume. `cache_bytes` bounds that for cached prefixes, `cached_share`
    their part of the cells of a unified layout: attention reads past cells that nobody runs in, which slows all down.
    """

    def __init__(
        self, memory: Memory, sharing: Sharing, *, swap_bytes: int, cache_bytes: int, cached_share: float = CACHED_SHARE
    ) -> None:
        self._memory = memory
        self.n_ctx = memory.n_ctx
        self.n_seq_ids = memory.n_seq_ids
        self.unified = memory.kv_unified
        self._n_cells = memory.n_ctx if self.unified else memory.n_ctx_seq * memory.n_seq_ids
        self._swap_bytes = swap_bytes
        self._most_cached = cached_share * self._n_cells
        self.n_swaps = self.n_recomputes = 0
        """Sequences that gave up their cells so far: to host memory, or to be computed again."""
        self.cache = PrefixCache(sharing, host_bytes=cache_bytes)
        self._reset_accounting()

    def _reset_accounting(self) -> None:
        self.swapped_bytes = 0
        """Host memory that holds swapped-out sequences now."""
        self._cells = Cells()
        # Heaps: the lowest is given first, so those in use stay close. Only the first n_seq_max may be in a batch.
        self._free_ids = list(range(self._memory.n_seq_max))
        self._shelf_ids = list(range(self._memory.n_seq_max, self.n_seq_ids))
        self._running: dict[int, Seq] = {}
        self._moves: list[Callable[[], object]] = []
        self._moving: list[Seq] = []
        self._copied: dict[Seq | CachedPrefix, SavedState] = {}  # within one `apply`

    # --- what there is ------------------------------------------------------------------------------------------

    @property
    def n_used(self) -> int:
        """Cells of running sequences; shared ones count once."""
        return n_held(sequence.cells for sequence in self._running.values())

    @property
    def n_cached(self) -> int:
        """Cells that only cached prefixes hold."""
        return self._cells.n_used - self.n_used

    @property
    def n_free(self) -> int:
        """Cells that nobody holds."""
        return self._n_cells - self._cells.n_used

    @property
    def n_free_ids(self) -> int:
        """seq_ids that neither a running sequence nor a cached prefix has."""
        return len(self._free_ids) + len(self._shelf_ids)

    def can_admit(self, sequence: Seq, match: Match | None, n_more: int, *, without: Sequence[Seq] = ()) -> bool:
        """Whether a waiting sequence and `n_more` other cells fit, with cached prefixes evicted if need be.

        `without`: running sequences that would be preempted for it.
        """
        if not self.unified:
            return True
        shared = self._cells.share(match.source.cells, match.n) if match and self._shares_cells(match) else None
        staying = [s.cells for s in self._running.values() if s not in without]
        held = n_held([*staying, shared])
        n_new = sequence.n_tokens - (shared.stop if shared else 0)
        self._cells.free(shared)
        at_first = match.source.n_computed if match and shared is None else 0  # restored whole, before it is cut
        return self._n_cells - held >= max(n_new + n_more, at_first)

    # --- planning: books now, memory in `apply` -----------------------------------------------------------------

    def admit(self, sequence: Seq, match: Match | None = None) -> None:
        """Gives a sequence a seq_id, and what it had when it was swapped out, or else the prefix of `match`."""
        if sequence.saved:
            self._return(sequence)
        elif match is None:
            self._take_id(sequence, None)
        elif self._takes_over(match):
            self._take_over(sequence, match)
        else:
            self._take_prefix(sequence, match)
        if not sequence.admitted_at:  # not one that resumes
            self.cache.count(sequence, match)
        self.cache.track(sequence)
        sequence.admitted()

    def _return(self, sequence: Seq) -> None:
        self._take_id(sequence, None)
        self.ensure_free(sequence.n_computed)
        sequence.cells = self._cells.grow(None, sequence.n_computed)
        self._move(sequence, partial(self._swap_in, sequence))

    def _take_over(self, sequence: Seq, match: Match) -> None:
        """The sequence continues a cached prefix in its place."""
        cached, n = match.source, match.n
        assert isinstance(cached, CachedPrefix)
        self.cache.drop(cached)
        sequence.seq_id, sequence.n_computed = cached.seq_id, n
        sequence.cells = self._cells.cut(cached.cells, n)
        self._running[sequence.seq_id] = sequence
        self._moves.append(partial(self._memory.remove, sequence.seq_id, n))

    def _take_prefix(self, sequence: Seq, match: Match) -> None:
        source, n = match.source, match.n
        self._take_id(sequence, source)
        sequence.n_computed = n
        if self._shares_cells(match):
            sequence.cells = self._cells.share(source.cells, n)
            self._moves.append(partial(self._memory.copy, source.seq_id, sequence.seq_id, 0, n))
        else:
            self.ensure_free(source.n_computed, keep=source)
            sequence.cells = self._cells.grow(None, n)
            self._move(sequence, partial(self._copy, source, source.seq_id, source.saved, sequence))

    def preempt(self, sequence: Seq) -> None:
        """Takes cells and seq_id from a running sequence, which keeps its tokens and resumes later."""
        # What others hold too is found again when it resumes; a copy in host memory would take cells of its own.
        worth_saving = n_shared(sequence.cells) * 2 < sequence.n_computed
        self._moves.append(partial(self._swap_out, sequence.seq_id, sequence, worth_saving=worth_saving))
        self._give_up(sequence)
        sequence.preempted()

    def ensure_free(self, n_free: int, *, keep: object = None) -> bool:
        """Evicts cached prefixes, the least recently used first, until so many cells are free. Whether they are."""
        while self.unified and self.n_free < n_free:
            if not self._evict(keep, for_cells=True):
                return False
        return True

    def _evict(self, keep: object, *, for_cells: bool = False) -> bool:
        """A cached prefix, not `keep`, leaves its cells for host memory. False when there is none.

        `for_cells`: one that has cells to itself; others would make no room.
        """
        for cached in self.cache.in_cells:
            if cached is not keep and not (for_cells and cached.cells and cached.cells.refs > 1):
                self._move_out(cached)
                return True
        return False

    def _move_out(self, cached: CachedPrefix) -> None:
        self._moves.append(partial(self._save, cached, cached.seq_id))
        self.cache.leave_cells(cached)
        self._cells.free(cached.cells)
        cached.cells = None
        self._free_id(cached.seq_id)
        cached.seq_id = -1

    def _shares_cells(self, match: Match) -> bool:
        return self.cache.sharing == "cells" and match.source.seq_id >= 0

    def _takes_over(self, match: Match) -> bool:
        source = match.source
        if not isinstance(source, CachedPrefix) or source.seq_id < 0:
            return False
        if not self._free_ids and (len(self.cache.in_cells) == 1 or self.cache.sharing == "whole"):
            return True  # no other seq_id can be had, or only one that another prefix has
        return self.cache.sharing == "copy" and 2 * match.n >= source.n_computed

    def _take_id(self, sequence: Seq, keep: object) -> None:
        if not self._free_ids:
            self._evict(keep)
        if self.cache.sharing != "cells" and self._running:
            # llama.cpp computes neighbouring streams together: one that is only cached must not lie between them.
            between = range(min(self._running), self._free_ids[0])
            in_the_way = [c for c in self.cache.in_cells if c.seq_id in between and c is not keep]
            if in_the_way:
                self._move_out(min(in_the_way, key=lambda cached: cached.seq_id))
        sequence.seq_id = heappop(self._free_ids)
        self._running[sequence.seq_id] = sequence

    def _move(self, sequence: Seq, move: Callable[[], object]) -> None:
        """Notes a move that may fail: the sequence computes nothing before it is made."""
        sequence.moving = True
        self._moving.append(sequence)
        self._moves.append(move)

    # --- moving the memory --------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Makes the moves that were planned."""
        for move in self._moves:
            move()
        self._moves.clear()
        for sequence in self._moving:
            sequence.moving = False
        self._moving.clear()
        self._copied.clear()

    def _swap_out(self, seq_id: int, sequence: Seq, *, worth_saving: bool) -> None:
        room = self._swap_bytes - self.swapped_bytes
        saved = self._saved(seq_id) if worth_saving and room > 0 else None
        self._memory.remove(seq_id)
        if saved and saved.n_bytes <= room:
            sequence.saved = saved
            self.swapped_bytes += saved.n_bytes
            self.n_swaps += 1
        else:
            sequence.will_recompute()
            self.n_recomputes += 1

    def _swap_in(self, sequence: Seq) -> None:
        try:
            self._memory.restore_sequence(sequence.seq_id, sequence.saved)
        except OUT_OF_MEMORY as error:
            self.n_recomputes += 1
            self._recompute(sequence, error)
        self._drop_saved(sequence)

    def _copy(self, source: Seq | CachedPrefix, seq_id: int, saved: SavedState | None, sequence: Seq) -> None:
        """Copies a prefix by way of host memory: all of it, then cut, as llama.cpp knows no part of a state.

        `seq_id`, `saved`: where the source's memory was when this was planned.
        """
        try:
            state = saved or source.saved or self._copied.get(source)
            if state is None:
                if seq_id < 0:
                    raise LlamaError("there was no room for its prefix in host memory")
                state = self._copied[source] = self._memory.save_sequence(seq_id)
            self._memory.restore_sequence(sequence.seq_id, state)
            self._memory.remove(sequence.seq_id, sequence.n_computed)
        except OUT_OF_MEMORY as error:
            self.cache.uncount(sequence)
            self._recompute(sequence, error)

    def _recompute(self, sequence: Seq, error: Exception) -> None:
        log.warning("%s is computed from its first token: %s", sequence.id, error)
        self._memory.remove(sequence.seq_id)
        self._cells.free(sequence.cells)
        sequence.cells = None
        sequence.will_recompute()

    def _save(self, cached: CachedPrefix, seq_id: int) -> None:
        saved = self._saved(seq_id) if cached in self.cache.in_host else None
        self._memory.remove(seq_id)
        self.cache.keep_in_host(cached, saved)

    def _saved(self, seq_id: int) -> SavedState | None:
        try:
            return self._memory.save_sequence(seq_id)
        except OUT_OF_MEMORY as error:
            log.warning("the memory of seq_id %d is not kept: %s", seq_id, error)
            return None

    # --- what a step does ---------------------------------------------------------------------------------------

    def computed(self, sequence: Seq, n: int) -> None:
        """Notes that a sequence's next `n` pending tokens are in the cache."""
        sequence.cells = self._cells.grow(sequence.cells, n)
        sequence.computed(n)

    def release(self, sequence: Seq, *, keep: bool) -> None:
        """A sequence has ended: it holds nothing any more. `keep`: what it computed may be of use to others."""
        if sequence.seq_id >= 0:
            if keep and sequence.n_computed >= _LEAST_CACHED and self.cache.wants(sequence):
                self._cache(sequence)
            else:
                self._memory.remove(sequence.seq_id)
                self._give_up(sequence)
        self._drop_saved(sequence)
        sequence.n_computed = 0

    def _cache(self, sequence: Seq) -> None:
        tokens = sequence.tokens[: sequence.n_computed].copy()
        cached = CachedPrefix(tokens, sequence.salt, sequence.seq_id, sequence.cells)
        self.cache.forget(sequence)
        del self._running[sequence.seq_id]
        sequence.seq_id, sequence.cells = -1, None
        for useless in self.cache.add(cached):
            self._forget(useless)
        if cached in self.cache.in_cells:
            self._settle(cached)
        self.apply()

    def _settle(self, cached: CachedPrefix) -> None:
        """Keeps the cells that are only cached few; one that is too long by itself does not drive the others out."""
        if self.unified and cached.n_computed > self._most_cached:
            self._move_out(cached)
            return
        self._shelve(cached)
        while self.unified and self.n_cached > self._most_cached and self._evict(None):
            pass

    def _shelve(self, cached: CachedPrefix) -> None:
        """Moves its cells to a seq_id that cannot run, where there are such."""
        if self.n_seq_ids == self._memory.n_seq_max:
            return
        if not self._shelf_ids:
            self._evict(cached)
            self.apply()
        shelf_id = heappop(self._shelf_ids)
        self._memory.copy(cached.seq_id, shelf_id, 0, cached.n_computed)
        self._memory.remove(cached.seq_id)
        self._free_id(cached.seq_id)
        cached.seq_id = shelf_id

    def _forget(self, cached: CachedPrefix) -> None:
        """A cached prefix goes for good."""
        self.cache.drop(cached)
        if cached.seq_id >= 0:
            self._memory.remove(cached.seq_id)
            self._cells.free(cached.cells)
            self._free_id(cached.seq_id)

    def clear_cache(self) -> None:
        """Frees all cached prefixes, in cells and in host memory."""
        for cached in [*self.cache.in_cells, *self.cache.in_host]:
            self._forget(cached)

    def _give_up(self, sequence: Seq) -> None:
        self.cache.forget(sequence)
        self._cells.free(sequence.cells)
        sequence.cells = None
        del self._running[sequence.seq_id]
        self._free_id(sequence.seq_id)
        sequence.seq_id = -1

    def _free_id(self, seq_id: int) -> None:
        heappush(self._free_ids if seq_id < self._memory.n_seq_max else self._shelf_ids, seq_id)

    def _drop_saved(self, sequence: Seq) -> None:
        if sequence.saved:
            self.swapped_bytes -= sequence.saved.n_bytes
            sequence.saved = None

    # --- integrity ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `AssertionError` when the books do not add up, or are not what llama.cpp has (DESIGN.md)."""
        seq_ids = [*self._free_ids, *self._shelf_ids]
        check_invariants(self._memory, self._cells.n_used, self._running, self.cache, seq_ids)
        require(self.n_free >= 0, f"{self._cells.n_used} cells are used of {self._n_cells}")
        require(not self._moves, "the memory is not where the books have it")
        require(0 <= self.swapped_bytes <= self._swap_bytes, f"{self.swapped_bytes} bytes are swapped out")

    def dump(self) -> str:
        """Who holds what, for the log."""
        seq_ids = [*self._free_ids, *self._shelf_ids]
        return dump_cells(self._memory, self._cells.n_used, self._running, self.cache, seq_ids)

    def rebuild(self) -> None:
        """Empties the memory and starts the books anew, trusting none of them: nobody holds anything any more."""
        self._memory.clear()
        self._reset_accounting()
        self.cache.clear()
