"""The memory of cached prefixes: which are evicted from cells, what is saved in host memory, states for files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heappop
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.config import Sharing
from cppbatch.engine.kv.accounting import CellAccounting
from cppbatch.engine.kv.batch_order import PaddingRow
from cppbatch.engine.kv.cached_prefix import CachedPrefix, Salt
from cppbatch.engine.kv.checkpoints import CheckpointPlaces, StateWithParts
from cppbatch.engine.kv.memory import OUT_OF_MEMORY, Memory
from cppbatch.engine.kv.moves import MoveQueue
from cppbatch.engine.kv.prefix_cache import REUSE_COSTS, PrefixCache, ReuseCosts
from cppbatch.engine.kv.prefix_tier import PrefixTier, TierLimits
from cppbatch.engine.kv.radix_tree import Tokens
from cppbatch.engine.kv.save_cost import SaveCost
from cppbatch.engine.kv.sharing import SHARING
from cppbatch.engine.sequence import SavedState, Seq

log = logging.getLogger("cppbatch.engine")

CACHED_SHARE = 0.25
"""The default of `cached_share`."""
CHANCE_OF_REUSE = 0.1
"""The estimated probability that a never reused prefix will be reused."""


class PrefixMemory(CellAccounting):
    """Cached prefixes in cells are evicted to host memory when their cells or seq_ids are needed.

    `swap_bytes`: host memory for preempted sequences; beyond it, they are recomputed when they resume. `cache_bytes`:
    host memory for cached prefixes. `cached_share`: fraction of the cells of a unified layout that cached prefixes may
    hold; attention iterates over these cells too, which slows every row down (docs/decisions/0005). `shifts_cells`:
    whether a context shift can move the positions of cells; otherwise it recomputes them. `on_gpu`: prefixes are copied
    between streams on the device, not through host memory. `places`: where prompts get checkpoints, if the memory can
    only be truncated there; None: no checkpoints. `tier`: cached prefixes below host memory. `reuse_costs`: those
    of `PrefixCache`. `token_s`: as in `SaveCost`. `clock`: seconds, to time saves.
    """

    def __init__(
        self,
        memory: Memory,
        sharing: Sharing,
        *,
        swap_bytes: int,
        cache_bytes: int,
        cached_share: float = CACHED_SHARE,
        shifts_cells: bool = False,
        on_gpu: bool = False,
        places: CheckpointPlaces | None = None,
        tier: PrefixTier | None = None,
        reuse_costs: ReuseCosts = REUSE_COSTS,
        token_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__(memory)
        self._clock = clock
        self._on_gpu = on_gpu
        self._places = places
        self._shifts_cells = shifts_cells
        self._cached_share = cached_share
        self._save_cost, self._part_cost = SaveCost(token_s), SaveCost(token_s)
        cache = self.cache = PrefixCache(SHARING[sharing](memory), host_bytes=cache_bytes, tier=tier, costs=reuse_costs)
        self.moves = MoveQueue(
            memory, self._cells, self._save_cost, clock, swap_bytes=swap_bytes, on_gpu=on_gpu,
            uncount=cache.uncount, keep_part=cache.keep_part if places else None,
        )  # fmt: skip
        self.apply = self.moves.apply
        """Executes the planned moves in llama.cpp's memory."""
        self._limit_tier()

    def memory_recreated(self, sharing: Sharing) -> None:
        """Called after the empty memory was recreated, possibly in the other layout. `sharing`: as in the
        constructor."""
        self._free_all()
        self.cache.sharing = SHARING[sharing](self._memory)
        self._limit_tier()

    def _limit_tier(self) -> None:
        if self.cache.tier:
            whole = not self.cache.sharing.shares_prefixes
            self.cache.tier.set_limits(TierLimits(whole, self.cache.host_bytes, self.n_ctx_seq))

    # --- in cells -----------------------------------------------------------------------------------------------------

    def cached_ids(self) -> list[int]:
        """seq_ids that may be in a batch and only hold a cached prefix."""
        return [cached.seq_id for cached in self.cache.in_cells if cached.seq_id < self._memory.n_seq_max]

    def padding_rows(self, seq_ids: Collection[int]) -> list[PaddingRow]:
        """Padding rows for these seq_ids, each of which is empty or only holds a cached prefix.

        On a GPU, the row follows the prefix. On a CPU, attention to the prefix would take time, so it moves to host
        memory; as it does where a row would remove cells of a window or change a state.
        """
        start_of: dict[int, int] = {}
        for cached in [cached for cached in self.cache.in_cells if cached.seq_id in seq_ids]:
            if self._on_gpu and not (self.n_window or self.has_states) and cached.n_positions < self._memory.n_ctx_seq:
                start_of[cached.seq_id] = cached.n_positions
            else:
                self._move_out(cached)
        return [PaddingRow(seq_id, start_of.get(seq_id, 0)) for seq_id in seq_ids]

    def remove_padding(self, rows: Iterable[PaddingRow]) -> None:
        """Removes the cells of padding rows, after a step."""
        for row in rows:
            self._memory.remove_padding(row.seq_id, row.position)

    def ensure_free(self, n_free: int, *, keep: object = None) -> bool:
        """Evicts cached prefixes, least recently used first, until `n_free` cells are free.

        `keep`: a prefix not to evict. Returns whether the cells are free; True in the per-sequence layout.
        """
        while self.unified and self.n_free < n_free:
            if not self._evict(keep, for_cells=True):
                return False
        return True

    def _evict(self, keep: object, *, for_cells: bool = False) -> bool:
        """Moves the least recently used cached prefix, except `keep`, to host memory. False if there is none.

        `for_cells`: skip prefixes whose cells are all shared, because evicting them frees no cells.
        """
        for cached in self.cache.in_cells:
            if cached is not keep and not (for_cells and cached.cells and cached.cells.refs > 1):
                self._move_out(cached)
                return True
        return False

    def _move_out(self, cached: CachedPrefix) -> None:
        self.moves.add(self._save, cached, cached.seq_id)
        is_worth = self._save_cost.is_worth(cached.n_computed, self._chance_of_reuse(cached))
        self.cache.leave_cells(cached, for_host=is_worth)
        self._cells.free(cached.cells)
        cached.cells = None
        self._free_id(cached.seq_id)
        cached.seq_id = -1

    def _chance_of_reuse(self, cached: CachedPrefix) -> float:
        """The estimated probability that a token of a cached prefix will be reused from it: the mean over its tokens.

        Tokens that others have too will be reused from those. So of many prefixes with a common start, all but the last
        one are only worth their own tokens.
        """
        n, n_elsewhere = cached.n_computed, self.cache.n_elsewhere(cached)
        n_reused = max(0, cached.n_reused - n_elsewhere)
        return (n_reused + CHANCE_OF_REUSE * (n - n_elsewhere - n_reused)) / n

    def _prefix_at(self, seq_id: int) -> CachedPrefix | None:
        return next((cached for cached in self.cache.in_cells if cached.seq_id == seq_id), None)

    def move_all_out(self) -> None:
        """Empties the memory, so that it can be recreated. Cached prefixes move to host memory, as far as they fit.

        All running sequences must have been preempted.
        """
        for cached in list(self.cache.in_cells):
            self._move_out(cached)
        self.apply()

    def _take_id(self, sequence: Seq, keep: object) -> None:
        if not self._free_ids:
            self._evict(keep)
        if not self.cache.sharing.shares_any_cells and self.running:
            # llama.cpp computes adjacent streams together: no stream between them should only hold a cached prefix.
            between = range(min(self.running), self._free_ids[0])
            in_the_way = [c for c in self.cache.in_cells if c.seq_id in between and c is not keep]
            if in_the_way:
                self._move_out(min(in_the_way, key=lambda cached: cached.seq_id))
        sequence.seq_id = heappop(self._free_ids)
        self.running[sequence.seq_id] = sequence

    def _limit_cached_cells(self, cached: CachedPrefix) -> None:
        """Evicts until cached prefixes hold at most their share of the cells.

        A new prefix that alone exceeds the share is evicted immediately; the others stay.
        """
        max_cached = self._cached_share * self.n_cells
        if self.unified and cached.n_computed > max_cached:
            self._move_out(cached)
            return
        self._move_to_cache_only_id(cached)
        while self.unified and self.n_cached > max_cached and self._evict(None):
            pass

    def _move_to_cache_only_id(self, cached: CachedPrefix) -> None:
        """Moves the cells to a seq_id that cannot be in a batch, if available, to free one that can."""
        if self.n_seq_ids == self._memory.n_seq_max:
            return
        if not self._cache_only_ids:
            self._evict(cached)
            self.apply()
        cache_only_id = heappop(self._cache_only_ids)
        self._memory.copy(cached.seq_id, cache_only_id, 0, cached.n_positions)
        self._memory.remove(cached.seq_id)
        self._free_id(cached.seq_id)
        cached.seq_id = cache_only_id

    def _drop(self, cached: CachedPrefix) -> None:
        """Removes a cached prefix and frees its memory."""
        self.cache.drop(cached)
        if cached.seq_id >= 0:
            self._memory.remove(cached.seq_id)
            self._cells.free(cached.cells)
            self._free_id(cached.seq_id)

    def clear_cache(self) -> None:
        """Removes all cached prefixes, in cells and in host memory."""
        for cached in [*self.cache.in_cells, *self.cache.in_host]:
            self._drop(cached)
        for checkpoint in list(self.cache.checkpoints):
            self.cache.drop_checkpoint(checkpoint)
        self.cache.slots.clear()

    # --- in host memory -----------------------------------------------------------------------------------------------

    def _save(self, cached: CachedPrefix, seq_id: int) -> None:
        self._save_copy(cached, seq_id)
        self._memory.remove(seq_id)

    def _save_copy(self, cached: CachedPrefix, seq_id: int) -> None:
        saved = self.moves.save(seq_id, cached.n_computed) if cached in self.cache.in_host else None
        self.cache.keep_in_host(cached, saved)

    def _save_checkpoint(self, seq_id: int, tokens: Tokens, salt: Salt) -> None:
        """Creates a checkpoint of a sequence that has computed exactly these tokens, unless it exists."""
        if not self.cache.host_bytes or self.cache.has_checkpoint(tokens, salt):
            return
        began = self._clock()
        try:
            saved = self.cache.sharing.save_checkpoint(seq_id)
        except OUT_OF_MEMORY as error:
            log.warning("cannot save a checkpoint of seq_id %d: %s", seq_id, error)
            return
        self._part_cost.observe(1, self._clock() - began)
        self.cache.add_checkpoint(tokens.copy(), salt, saved)

    def state_of_slot(self, slot: int) -> tuple[CachedPrefix, SavedState] | None:
        """The cached prefix of a slot's last request, possibly with more tokens, and its state; None if it was evicted.
        Raises `LlamaError` if memory for the copy runs out."""
        cached = self.cache.of_slot(slot)
        if cached is None:
            return None
        return cached, self.cache.with_parts(cached, cached.saved or self._memory.save_sequence(cached.seq_id))

    def state_of(self, cached: CachedPrefix) -> SavedState | None:
        """The state of a cached prefix; None if it is no longer cached, or if memory for a copy runs out."""
        if cached in self.cache.in_cells:
            state = self.moves.save(cached.seq_id, cached.n_computed)
        else:
            state = cached.saved if cached in self.cache.in_host else None
        return state and self.cache.with_parts(cached, state)

    def add_cached(self, tokens: Tokens, salt: Salt, data: npt.NDArray[np.uint8], form: Mapping[str, Any]) -> None:
        """Adds a state (`read_state`) with its checkpoints as a cached prefix in host memory, if it fits."""
        cached = CachedPrefix(tokens, salt, -1, None)
        cached.n_reused = len(tokens)
        self._add_to_host(cached, self.read_state(data, form))

    def _add_to_host(self, cached: CachedPrefix, state: SavedState) -> None:
        if not isinstance(state, StateWithParts):
            self.cache.add_to_host(cached, state)
            return
        self.cache.add_to_host(cached, state.state)
        for n, part in state.parts:
            if self.cache.sharing.has_parts and not self.cache.has_checkpoint(cached.tokens[:n], cached.salt):
                self.cache.add_checkpoint(cached.tokens[:n], cached.salt, part)

    def read_state(self, data: npt.NDArray[np.uint8], form: Mapping[str, Any]) -> SavedState:
        """The saved state of a context of this model, from its `data` and `form`."""
        read = StateWithParts.read(data, form, self._memory.read_state)
        return read if read.parts else read.state

    def restore_slot(self, slot: int, tokens: Tokens, salt: Salt, state: SavedState) -> bool:
        """Adds a state as a cached prefix in host memory, and assigns it to a slot. False if it does not fit."""
        self.cache.assign_slot(slot, tokens, salt)
        if self.cache.of_slot(slot) is None:
            self._add_to_host(CachedPrefix(tokens, salt, -1, None), state)
        return self.cache.of_slot(slot) is not None

    def erase_slot(self, slot: int) -> int:
        """Removes the cached prefixes that start with the tokens of a slot's last request. Returns their number."""
        n_tokens = len(self.cache.slots[slot][0]) if slot in self.cache.slots else 0
        while cached := self.cache.of_slot(slot):
            self._drop(cached)
        self.cache.slots.pop(slot, None)
        return n_tokens
