"""Accounting of the KV cache: cells and seq_ids of sequences, and states saved in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.config import KvLayout, Sharing
from cppbatch.engine.cells import Cells, n_held, n_shared
from cppbatch.engine.kv.batch_order import PaddingRow
from cppbatch.engine.kv.cached_prefix import CachedPrefix, Checkpoint, Match, Salt
from cppbatch.engine.kv.checkpoints import CheckpointPlaces, StateWithParts
from cppbatch.engine.kv.invariants import check_invariants, dump_cells, require
from cppbatch.engine.kv.prefix_cache import PrefixCache
from cppbatch.engine.kv.prefix_tier import PrefixTier, TierLimits
from cppbatch.engine.kv.radix_tree import Tokens
from cppbatch.engine.kv.save_cost import SaveCost
from cppbatch.engine.sequence import SavedState, Seq
from cppbatch.errors import LlamaError

log = logging.getLogger("cppbatch.engine")

CACHED_SHARE = 0.25
"""The default of `KVPool`'s `cached_share`."""
_MIN_CACHED = 20  # tokens: computing a shorter prefix is as fast as reusing it
_CHECKPOINT_SHARE = 0.05  # fraction of a prompt's computation time that its checkpoints may take
_CHANCE_OF_REUSE = 0.1  # estimated probability that a never reused prefix will be reused

OUT_OF_MEMORY = (LlamaError, MemoryError)


class Memory(Protocol):
    """The part of a llama.cpp context that holds keys and values."""

    n_ctx: int
    n_ctx_seq: int
    n_seq_max: int
    n_seq_ids: int
    kv_unified: bool

    @property
    def has_streams(self) -> bool: ...
    @property
    def can_shift(self) -> bool: ...
    @property
    def shares_cells(self) -> bool: ...
    @property
    def attention_tile(self) -> int: ...
    @property
    def n_window(self) -> int: ...
    @property
    def has_states(self) -> bool: ...
    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool: ...
    def remove_padding(self, seq_id: int, position: int) -> None: ...
    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None: ...
    def clear(self) -> None: ...
    def shift(self, seq_id: int, start: int, by: int) -> None: ...
    def last_position(self, seq_id: int) -> int: ...
    def share_prefix(self, source: int, target: int, n: int) -> None: ...
    def first_cut(self, seq_id: int) -> int: ...
    def cut(self, seq_id: int, n: int) -> None: ...
    def copy_cut(self, source: int, target: int, n: int) -> SavedState | None: ...
    def share_cells(self, source: int, target: int, part: Any) -> None: ...  # a part that `save_part` returned
    def save_part(self, seq_id: int) -> SavedState: ...
    def restore_part(self, seq_id: int, part: Any) -> None: ...
    def save_sequence(self, seq_id: int) -> SavedState: ...
    def restore_sequence(self, seq_id: int, state: Any) -> None: ...  # a state that `save_sequence` returned
    def read_state(self, data: npt.NDArray[np.uint8], form: Mapping[str, Any]) -> SavedState: ...


class KVPool:
    """The cells and seq_ids of a context.

    In the unified layout, all sequences share the cells, and may hold the same ones; in the per-sequence layout, each
    seq_id has its own `n_ctx_seq` cells.

    Planning a step (`admit`, `preempt`, `ensure_free`) changes the accounting and records moves: copies, removals,
    saves and restores in llama.cpp's memory. `apply` executes them in the planned order.

    The memory may be recreated in the other layout: `move_all_out` before, `memory_recreated` after.

    `swap_bytes`: host memory for preempted sequences; beyond it, they are recomputed when they resume. `cache_bytes`:
    host memory for cached prefixes. `cached_share`: fraction of the cells of a unified layout that cached prefixes may
    hold; attention iterates over these cells too, which slows every row down (docs/decisions/0005). `shifts_cells`:
    whether a context shift can move the positions of cells; otherwise it recomputes them. `on_gpu`: prefixes are copied
    between streams on the device, not through host memory. `places`: where prompts get checkpoints, if the memory can
    only be truncated there; None: no checkpoints. `tier`: cached prefixes below host memory. `token_s`: as in
    `SaveCost`. `clock`: seconds, to time saves.
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
        token_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._memory = memory
        self._clock = clock
        self._on_gpu = on_gpu
        self._save_cost = SaveCost(token_s)
        self._places = places
        self._part_cost = SaveCost(token_s)
        self._swap_bytes = swap_bytes
        self._cached_share = cached_share
        self._shifts_cells = shifts_cells
        self.swapped_bytes = 0
        """Host memory of the currently swapped sequences, in bytes."""
        self.n_swaps = self.n_recomputes = 0
        """Preempted sequences so far: saved to host memory, and recomputed instead."""
        self.cache = PrefixCache(sharing, host_bytes=cache_bytes, first_cut=memory.first_cut, tier=tier)
        self.memory_recreated(sharing)

    def _all_free(self) -> None:
        """Initialises the accounting for empty memory."""
        memory = self._memory
        self.n_ctx = memory.n_ctx
        self.n_ctx_seq = memory.n_ctx_seq
        self.n_seq_ids = memory.n_seq_ids
        self.unified = memory.kv_unified
        self.n_cells = memory.n_ctx if self.unified else memory.n_ctx_seq * memory.n_seq_ids
        self._max_cached = self._cached_share * self.n_cells
        self._cells = Cells()
        # Heaps: the lowest free seq_id is used first, so that used seq_ids are adjacent. Only the first n_seq_max may
        # be in a batch; the others can hold cells of cached prefixes.
        self._free_ids = list(range(memory.n_seq_max))
        self._cache_only_ids = list(range(memory.n_seq_max, self.n_seq_ids))
        self.running: dict[int, Seq] = {}
        """The running sequences by seq_id."""
        self._moves: list[Callable[[], object]] = []
        self._moving: list[Seq] = []
        self._copied: dict[Seq | CachedPrefix, SavedState] = {}  # within one `apply`

    # --- counts -------------------------------------------------------------------------------------------------

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

    @property
    def has_streams(self) -> bool:
        """Whether each seq_id has its own memory, so that only rows of consecutive seq_ids are computed together."""
        return self._memory.has_streams

    @property
    def attention_tile(self) -> int:
        """As `Context.attention_tile`; 1 on a GPU."""
        return 1 if self._on_gpu else self._memory.attention_tile

    @property
    def n_window(self) -> int:
        """Tokens of the model's sliding window; 0: no window."""
        return self._memory.n_window

    @property
    def has_states(self) -> bool:
        """Whether a sequence has recurrent states."""
        return self._memory.has_states

    @property
    def layout(self) -> KvLayout:
        """The current layout."""
        return "unified" if self.unified else "per-sequence"

    def can_admit(self, sequence: Seq, match: Match | None, n_more: int, *, without: Sequence[Seq] = ()) -> bool:
        """Whether the cells for a waiting sequence and `n_more` others are free after evicting cached prefixes.

        `match`: the prefix to reuse. `without`: running sequences that would be preempted for it.
        """
        if not self.unified:
            return True
        shared = self._cells.share(match.source.cells, match.n) if match and self._shares_cells(match) else None
        staying = [s.cells for s in self.running.values() if s not in without]
        held = n_held([*staying, shared])
        n_new = sequence.n_tokens - (shared.stop if shared else 0)
        self._cells.free(shared)
        at_first = match.source.n_computed if match and shared is None else 0  # restored whole, then truncated
        return self.n_cells - held >= max(n_new + n_more, at_first)

    # --- planning: changes the accounting; `apply` changes the memory -------------------------------------------

    def admit(self, sequence: Seq, match: Match | None = None) -> None:
        """Gives a sequence a seq_id, and its swapped-out state or the prefix of `match`."""
        is_new = not sequence.admitted_at
        branch = self.cache.branch(sequence) if is_new and self._makes_checkpoints(sequence) else 0
        if sequence.saved:
            self._plan_swap_in(sequence)
        elif match is None:
            self._take_id(sequence, None)
        elif self._should_continue_in_place(match):
            self._continue_in_place(sequence, match)
        else:
            self._reuse_prefix(sequence, match)
        if is_new:
            self.cache.count(sequence, match)
        if is_new and self._makes_checkpoints(sequence):
            self._plan_checkpoints(sequence, branch)
        self.cache.track(sequence)
        sequence.admitted()

    def _makes_checkpoints(self, sequence: Seq) -> bool:
        """Whether others can only reuse a sequence's prompt at checkpoints."""
        has_none = self._places is None or not self.cache.host_bytes or self.cache.shares_prefixes or sequence.is_scored
        return not has_none and self.cache.wants(sequence)

    def _plan_checkpoints(self, sequence: Seq, branch: int) -> None:
        """Chooses where others will be able to reuse the prompt of a new sequence, which branches off another one at
        `branch`."""
        assert self._places
        prompt, start = sequence.tokens[: sequence.n_prompt], sequence.n_computed
        step = max(self._places.min_step, self._part_cost.tokens_for(_CHECKPOINT_SHARE))
        places = map(sequence.before_media, (*self._places.of_prompt(prompt, start, step), branch))
        for n in dict.fromkeys(places):
            if n >= max(_MIN_CACHED, start + 1) and not self.cache.has_checkpoint(prompt[:n], sequence.salt):
                sequence.stop_at(n)

    def _plan_swap_in(self, sequence: Seq) -> None:
        """Plans to restore the whole state. Then the sequence shares the cells of a prefix that is already in cells."""
        match = self.cache.longest_in_cells(sequence)
        if match and match.n < _MIN_CACHED:
            match = None
        source, n = (match.source, match.n) if match else (None, 0)
        self._take_id(sequence, source)
        self.ensure_free(sequence.n_computed, keep=source)
        shared = self._cells.share(source.cells, n) if source else None
        sequence.cells = self._cells.grow(shared, sequence.n_computed - n) if n < sequence.n_computed else shared
        self._move(sequence, partial(self._swap_in, sequence, match, source.seq_id if source else -1))

    def _continue_in_place(self, sequence: Seq, match: Match) -> None:
        """Gives the sequence the seq_id and cells of a cached prefix, truncated to the match.

        The truncated part may belong to another conversation, so the prefix is kept in host memory if useful.
        """
        cached, n = match.source, match.n
        assert isinstance(cached, CachedPrefix)
        sequence.seq_id, sequence.n_computed = cached.seq_id, n
        sequence.cells = self._cells.cut(cached.cells, n)
        self.running[sequence.seq_id] = sequence
        if not match.of_slot and self._is_worth_keeping(cached, n):
            self._moves.append(partial(self._save_copy, cached, cached.seq_id))
            self.cache.leave_cells(cached, for_host=True)
            cached.seq_id, cached.cells = -1, None
        else:
            self.cache.drop(cached)
        if n < cached.n_computed and self.cache.sharing == "checkpoints":
            self._move(sequence, partial(self._cut, sequence, match.checkpoint))
        elif n < cached.n_computed:
            self._moves.append(partial(self._memory.remove, sequence.seq_id, sequence.span(n)))
        elif self._makes_checkpoints(sequence):
            self._moves.append(partial(self._save_checkpoint, sequence.seq_id, cached.tokens, cached.salt))

    def _is_worth_keeping(self, cached: CachedPrefix, n: int) -> bool:
        """Whether to save a cached prefix before its cells are truncated to `n` tokens."""
        n_lost = cached.n_computed - n
        chance = _CHANCE_OF_REUSE * n_lost / cached.n_computed
        return n_lost >= _MIN_CACHED and self._save_cost.is_worth(cached.n_computed, chance)

    def _reuse_prefix(self, sequence: Seq, match: Match) -> None:
        source, n = match.source, match.n
        self._take_id(sequence, source)
        sequence.n_computed = n
        if match.is_cut and source.seq_id >= 0 and self.cache.sharing == "checkpoints":
            if self._shares_cells(match):
                sequence.cells = self._cells.share(source.cells, n)
            else:
                self.ensure_free(source.n_computed, keep=source)
                sequence.cells = self._cells.grow(None, n)
            self._move(sequence, partial(self._copy_cut, source.seq_id, sequence))
        elif self._shares_cells(match):
            sequence.cells = self._cells.share(source.cells, n)
            if self.cache.sharing == "cells":
                self._moves.append(partial(self._memory.copy, source.seq_id, sequence.seq_id, 0, sequence.span(n)))
            else:
                self._move(sequence, partial(self._share, source, source.seq_id, sequence, match.checkpoint))
        else:
            self.ensure_free(source.n_computed, keep=source)
            sequence.cells = self._cells.grow(None, n)
            self._move(sequence, partial(self._copy, source, source.seq_id, source.saved, sequence, match.checkpoint))

    def preempt(self, sequence: Seq, *, save: bool | None = None) -> None:
        """Takes cells and seq_id from a running sequence, which keeps its tokens and resumes later.

        `save`: whether to keep its state in host memory if there is room; None: if useful.
        """
        if save is None:  # a sequence that shares most of its cells will find them again as a prefix
            n = sequence.n_computed
            finds_again = self.cache.shares_prefixes and n_shared(sequence.cells) * 2 >= n
            save = not finds_again and self._save_cost.is_worth(n, chance=1.0)
        self._moves.append(partial(self._swap_out, sequence.seq_id, sequence, save=save))
        self._free_cells_and_id(sequence)
        sequence.preempted()

    def can_move(self, sequence: Seq) -> bool:
        """Whether a running sequence can move to another seq_id."""
        return not self.has_states and not sequence.moving

    def move_to(self, seq_id: int, sequence: Seq) -> None:
        """Moves a running sequence to this seq_id, which is empty or only holds a cached prefix. On a GPU, the next
        decode first copies its cells, and can compute it."""
        if cached := self._prefix_at(seq_id):
            self._move_out(cached)
        self._free_ids.remove(seq_id)
        heapify(self._free_ids)
        old = sequence.seq_id
        del self.running[old]
        self.running[seq_id], sequence.seq_id = sequence, seq_id
        self._free_id(old)
        if self._on_gpu:
            self._moves.append(partial(self._memory.copy, old, seq_id))
            self._moves.append(partial(self._memory.remove, old))
        else:
            self._move(sequence, partial(self._move_stream, old, sequence))

    def move_s(self, seq_id: int, sequence: Seq) -> float:
        """The estimated seconds of `move_to`: saving the prefix cached there, and saving and restoring the sequence's
        state, except on a GPU. 0 before any measurement."""
        cached = self._prefix_at(seq_id)
        save_s = self._save_cost.save_s(cached.n_computed) if cached else 0.0
        return save_s if self._on_gpu else save_s + self._save_cost.round_trip_s(sequence.n_computed)

    def _prefix_at(self, seq_id: int) -> CachedPrefix | None:
        return next((cached for cached in self.cache.in_cells if cached.seq_id == seq_id), None)

    def move_all_out(self) -> None:
        """Empties the memory, so that it can be recreated. Cached prefixes move to host memory, as far as they fit.

        All running sequences must have been preempted.
        """
        for cached in list(self.cache.in_cells):
            self._move_out(cached)
        self.apply()

    def memory_recreated(self, sharing: Sharing) -> None:
        """Called after the empty memory was recreated, possibly in the other layout. `sharing`: as in the
        constructor."""
        self.cache.sharing = sharing
        self._all_free()
        if self.cache.tier:
            limits = TierLimits(not self.cache.shares_prefixes, self.cache.host_bytes, self.n_ctx_seq)
            self.cache.tier.set_limits(limits)

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
        self._moves.append(partial(self._save, cached, cached.seq_id))
        self.cache.leave_cells(
            cached, for_host=self._save_cost.is_worth(cached.n_computed, self._chance_of_reuse(cached))
        )
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
        return (n_reused + _CHANCE_OF_REUSE * (n - n_elsewhere - n_reused)) / n

    def _shares_cells(self, match: Match) -> bool:
        shares = self.cache.sharing == "cells" or (self.cache.sharing == "checkpoints" and self._memory.shares_cells)
        return shares and match.source.seq_id >= 0

    def _should_continue_in_place(self, match: Match) -> bool:
        """Whether the sequence takes over the cached prefix itself, instead of copying it or sharing its cells."""
        source = match.source
        if not isinstance(source, CachedPrefix) or source.seq_id < 0:
            return False
        if match.of_slot and self.cache.sharing == "copy":
            return True
        if not self._free_ids and (len(self.cache.in_cells) == 1 or not self.cache.shares_prefixes):
            return True  # the only way to get a seq_id, or the only one without evicting another prefix
        return self.cache.continues_in_place(source, match.n)

    def _take_id(self, sequence: Seq, keep: object) -> None:
        if not self._free_ids:
            self._evict(keep)
        if self.cache.sharing != "cells" and self.running:
            # llama.cpp computes adjacent streams together: no stream between them should only hold a cached prefix.
            between = range(min(self.running), self._free_ids[0])
            in_the_way = [c for c in self.cache.in_cells if c.seq_id in between and c is not keep]
            if in_the_way:
                self._move_out(min(in_the_way, key=lambda cached: cached.seq_id))
        sequence.seq_id = heappop(self._free_ids)
        self.running[sequence.seq_id] = sequence

    def _move(self, sequence: Seq, move: Callable[[], object]) -> None:
        """Records a move that may fail. The sequence does not compute before `apply` has executed it."""
        sequence.moving = True
        self._moving.append(sequence)
        self._moves.append(move)

    # --- moves in llama.cpp's memory ----------------------------------------------------------------------------

    def apply(self) -> None:
        """Executes the planned moves."""
        for move in self._moves:
            move()
        self._moves.clear()
        for sequence in self._moving:
            sequence.moving = False
        self._moving.clear()
        self._copied.clear()

    def _move_stream(self, seq_id: int, sequence: Seq) -> None:
        """Moves a sequence's memory from `seq_id` to its current seq_id."""
        try:
            began = self._clock()
            state = self._memory.save_sequence(seq_id)
            self._save_cost.observe(sequence.n_computed, self._clock() - began)
            self._memory.restore_sequence(sequence.seq_id, state)
        except OUT_OF_MEMORY as error:
            self._recompute(sequence, error)
        self._memory.remove(seq_id)

    def _swap_out(self, seq_id: int, sequence: Seq, *, save: bool) -> None:
        free_bytes = self._swap_bytes - self.swapped_bytes
        saved = self._try_save(seq_id, sequence.n_computed) if save and free_bytes > 0 else None
        self._memory.remove(seq_id)
        if saved and saved.n_bytes <= free_bytes:
            sequence.saved = saved
            self.swapped_bytes += saved.n_bytes
            self.n_swaps += 1
        else:
            sequence.will_recompute()
            self.n_recomputes += 1

    def _swap_in(self, sequence: Seq, match: Match | None, source_id: int) -> None:
        """`source_id`: the seq_id of the source of `match` at planning time."""
        try:
            self._memory.restore_sequence(sequence.seq_id, sequence.saved)
            if match and match.source.n_computed < match.n:
                raise LlamaError("the sequence whose prefix it shares could not be restored")
            if match:
                self._memory.share_prefix(source_id, sequence.seq_id, sequence.span(match.n))
        except OUT_OF_MEMORY as error:
            self.n_recomputes += 1
            self._recompute(sequence, error)
        self._drop_saved(sequence)

    def _cut(self, sequence: Seq, checkpoint: Checkpoint | None) -> None:
        """Truncates the cells that the sequence has taken over, to the checkpoint or as far as their window allows."""
        try:
            if checkpoint:
                self._memory.restore_part(sequence.seq_id, checkpoint.saved)
            else:
                self._memory.cut(sequence.seq_id, sequence.n_positions)
        except OUT_OF_MEMORY as error:
            self.cache.uncount(sequence)
            self._recompute(sequence, error)

    def _share(self, source: Seq | CachedPrefix, seq_id: int, sequence: Seq, checkpoint: Checkpoint | None) -> None:
        """Lets a sequence hold cells of the source, with the state at the checkpoint, or its current one.

        `seq_id`: the source's at planning time.
        """
        try:
            part = checkpoint.saved if checkpoint else self._copied.get(source)
            if part is None:
                part = self._copied[source] = self._memory.save_part(seq_id)
            self._memory.share_cells(seq_id, sequence.seq_id, part)
        except OUT_OF_MEMORY as error:
            self.cache.uncount(sequence)
            self._recompute(sequence, error)

    def _copy_cut(self, seq_id: int, sequence: Seq) -> None:
        """Lets a sequence reuse the first tokens of `seq_id`, as far as its window allows."""
        tokens = sequence.tokens[: sequence.n_computed]
        try:
            part = self._memory.copy_cut(seq_id, sequence.seq_id, sequence.n_positions)
            if part and self._places and not self.cache.has_checkpoint(tokens, sequence.salt):
                self.cache.add_checkpoint(tokens.copy(), sequence.salt, part)
        except OUT_OF_MEMORY as error:
            self.cache.uncount(sequence)
            self._recompute(sequence, error)

    def _save_checkpoint(self, seq_id: int, tokens: Tokens, salt: Salt) -> None:
        """Creates a checkpoint of a sequence that has computed exactly these tokens, unless it exists."""
        if not self.cache.host_bytes or self.cache.has_checkpoint(tokens, salt):
            return
        is_whole = self.cache.sharing == "whole"
        began = self._clock()
        try:
            saved = self._memory.save_sequence(seq_id) if is_whole else self._memory.save_part(seq_id)
        except OUT_OF_MEMORY as error:
            log.warning("cannot save a checkpoint of seq_id %d: %s", seq_id, error)
            return
        self._part_cost.observe(1, self._clock() - began)
        if is_whole:
            self.cache.add_to_host(CachedPrefix(tokens.copy(), salt, -1, None), saved)
        else:
            self.cache.add_checkpoint(tokens.copy(), salt, saved)

    def _copy(
        self,
        source: Seq | CachedPrefix,
        seq_id: int,
        saved: SavedState | None,
        sequence: Seq,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Copies the whole state of the source, through host memory or on the GPU, then truncates it to the prefix.

        `seq_id`, `saved`: the source's memory at planning time.
        """
        try:
            if self._on_gpu and seq_id >= 0 and not checkpoint:  # streams are copied in the next decode, over the part
                self._memory.copy(seq_id, sequence.seq_id)
            else:
                state = saved or source.saved or self._copied.get(source)
                if state is None:
                    if seq_id < 0:
                        raise LlamaError("its prefix did not fit into host memory")
                    state = self._copied[source] = self._memory.save_sequence(seq_id)
                self._memory.restore_sequence(sequence.seq_id, state)
            if checkpoint:
                self._memory.restore_part(sequence.seq_id, checkpoint.saved)
            else:
                self._memory.remove(sequence.seq_id, sequence.n_positions)
        except OUT_OF_MEMORY as error:
            self.cache.uncount(sequence)
            self._recompute(sequence, error)

    def _recompute(self, sequence: Seq, error: Exception) -> None:
        log.warning("recomputing %s from its first token: %s", sequence.id, error)
        self._memory.remove(sequence.seq_id)
        self._cells.free(sequence.cells)
        sequence.cells = None
        sequence.will_recompute()

    def _save(self, cached: CachedPrefix, seq_id: int) -> None:
        self._save_copy(cached, seq_id)
        self._memory.remove(seq_id)

    def _save_copy(self, cached: CachedPrefix, seq_id: int) -> None:
        saved = self._try_save(seq_id, cached.n_computed) if cached in self.cache.in_host else None
        self.cache.keep_in_host(cached, saved)

    def _try_save(self, seq_id: int, n: int) -> SavedState | None:
        """The state of a seq_id that holds `n` tokens; None if memory runs out."""
        began = self._clock()
        try:
            saved = self._memory.save_sequence(seq_id)
            self._save_cost.observe(n, self._clock() - began)
            return saved
        except OUT_OF_MEMORY as error:
            log.warning("cannot save the state of seq_id %d: %s", seq_id, error)
            return None

    # --- after a step -------------------------------------------------------------------------------------------

    def computed(self, sequence: Seq, n: int) -> None:
        """Marks the next `n` pending tokens of a sequence as computed."""
        sequence.cells = self._cells.grow(sequence.cells, n)
        sequence.computed(n)
        if sequence.stops and sequence.stops[0] <= sequence.n_computed:
            self._pass_stop(sequence)

    def _pass_stop(self, sequence: Seq) -> None:
        """Creates a checkpoint if the computed tokens end at a chosen place."""
        n = sequence.n_computed
        if n in sequence.stops and self._places and n <= sequence.n_exact:
            self._save_checkpoint(sequence.seq_id, sequence.tokens[:n], sequence.salt)
        sequence.stops = [stop for stop in sequence.stops if stop > n]

    def drop_draft(self, sequence: Seq) -> None:
        """Removes the draft tokens that a step has computed after the sequence's computed ones."""
        if not self._memory.remove(sequence.seq_id, sequence.n_positions):
            self.n_recomputes += 1
            self._recompute(sequence, LlamaError("its draft tokens cannot be removed"))

    def shift(self, sequence: Seq) -> None:
        """Drops tokens from a running sequence whose context is full (`Seq.shift`).

        In its cells, if those after the dropped tokens are its own: a cell's position applies to every sequence that
        shares it. Otherwise the tokens after the kept ones are recomputed.
        """
        n_computed, keep = sequence.n_computed, sequence.n_keep
        n = sequence.shift()
        first = keep + n
        if self._shifts_cells and n_computed >= first and n_shared(sequence.cells) <= first:
            self._memory.remove(sequence.seq_id, keep, first)
            sequence.cells, sequence.n_computed = self._cells.cut(sequence.cells, keep), n_computed - n
            if n_computed > first:
                self._memory.shift(sequence.seq_id, first, -n)
                sequence.cells = self._cells.grow(sequence.cells, n_computed - first)
                sequence.n_exact = min(keep, sequence.n_exact)
        else:
            n_kept = min(keep, n_computed)
            if not self._memory.remove(sequence.seq_id, n_kept):
                self._memory.remove(sequence.seq_id)
                n_kept = 0
            sequence.cells = self._cells.cut(sequence.cells, n_kept)
            sequence.will_recompute()
            sequence.n_computed = n_kept
        self.cache.track(sequence)

    def release(self, sequence: Seq, *, keep: bool) -> None:
        """Frees the memory of a finished sequence. `keep`: its tokens become a cached prefix, if useful."""
        if sequence.seq_id >= 0:
            n = sequence.before_media(min(sequence.n_computed, sequence.n_exact))
            keep = keep and n >= _MIN_CACHED and self.cache.wants(sequence)
            if keep and n < sequence.n_computed and (keep := self._memory.remove(sequence.seq_id, sequence.span(n))):
                sequence.cells, sequence.n_computed = self._cells.cut(sequence.cells, n), n
            if keep:
                self._keep_as_prefix(sequence)
            else:
                self._memory.remove(sequence.seq_id)
                self._free_cells_and_id(sequence)
        self._drop_saved(sequence)

    def _keep_as_prefix(self, sequence: Seq) -> None:
        tokens = sequence.tokens[: sequence.n_computed].copy()
        if sequence.request.id_slot >= 0:
            self.cache.assign_slot(sequence.request.id_slot, tokens, sequence.salt)
        cached = CachedPrefix(tokens, sequence.salt, sequence.seq_id, sequence.cells, sequence.n_positions)
        self.cache.forget(sequence)
        del self.running[sequence.seq_id]
        sequence.seq_id, sequence.cells = -1, None
        for redundant in self.cache.add(cached):
            if self.cache.sharing == "checkpoints" and redundant.seq_id >= 0:
                self._save_checkpoint(redundant.seq_id, redundant.tokens, redundant.salt)
            self._drop(redundant)
        if cached in self.cache.in_cells:
            self._limit_cached_cells(cached)
        self.apply()
        if self.cache.tier:
            self.cache.tier.kept(cached)

    def _limit_cached_cells(self, cached: CachedPrefix) -> None:
        """Evicts until cached prefixes hold at most their share of the cells.

        A new prefix that alone exceeds the share is evicted immediately; the others stay.
        """
        if self.unified and cached.n_computed > self._max_cached:
            self._move_out(cached)
            return
        self._move_to_cache_only_id(cached)
        while self.unified and self.n_cached > self._max_cached and self._evict(None):
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

    # --- slots ----------------------------------------------------------------------------------------------------

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
            state = self._try_save(cached.seq_id, cached.n_computed)
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
            if self.cache.sharing == "checkpoints" and not self.cache.has_checkpoint(cached.tokens[:n], cached.salt):
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

    def clear_cache(self) -> None:
        """Removes all cached prefixes, in cells and in host memory."""
        for cached in [*self.cache.in_cells, *self.cache.in_host]:
            self._drop(cached)
        for checkpoint in list(self.cache.checkpoints):
            self.cache.drop_checkpoint(checkpoint)
        self.cache.slots.clear()

    def _free_cells_and_id(self, sequence: Seq) -> None:
        self.cache.forget(sequence)
        self._cells.free(sequence.cells)
        sequence.cells = None
        del self.running[sequence.seq_id]
        self._free_id(sequence.seq_id)
        sequence.seq_id = -1

    def _free_id(self, seq_id: int) -> None:
        heappush(self._free_ids if seq_id < self._memory.n_seq_max else self._cache_only_ids, seq_id)

    def _drop_saved(self, sequence: Seq) -> None:
        if sequence.saved:
            self.swapped_bytes -= sequence.saved.n_bytes
            sequence.saved = None

    # --- invariants ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `AssertionError` if the accounting is inconsistent or does not match llama.cpp's memory."""
        seq_ids = [*self._free_ids, *self._cache_only_ids]
        check_invariants(self._memory, self._cells.n_used, self.running, self.cache, seq_ids)
        require(self.n_free >= 0, f"{self._cells.n_used} cells are used of {self.n_cells}")
        require(not self._moves, "planned moves were not applied")
        require(0 <= self.swapped_bytes <= self._swap_bytes, f"{self.swapped_bytes} bytes are swapped out")

    def dump(self) -> str:
        """The holder of each seq_id, for the log."""
        seq_ids = [*self._free_ids, *self._cache_only_ids]
        return dump_cells(self._memory, self._cells.n_used, self.running, self.cache, seq_ids)

    def rebuild(self) -> None:
        """Empties llama.cpp's memory and resets the accounting."""
        self._memory.clear()
        self._all_free()
        self.swapped_bytes = 0
        self.cache.clear()
