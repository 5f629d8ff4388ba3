"""The KV pool: which cells and seq_ids a sequence gets and loses, with the moves of keys and values for it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify

from cppbatch.engine.cells import n_held, n_shared
from cppbatch.engine.kv.cached_prefix import CachedPrefix, Match
from cppbatch.engine.kv.invariants import check_invariants, dump_cells, require
from cppbatch.engine.kv.prefix_memory import CHANCE_OF_REUSE, PrefixMemory
from cppbatch.engine.sequence import Seq
from cppbatch.errors import LlamaError

_CHECKPOINT_SHARE = 0.05  # fraction of a prompt's computation time that its checkpoints may take


class KVPool(PrefixMemory):
    """The cells and seq_ids of a context, with the prefixes cached in them. `PrefixMemory` has the constructor.

    Planning a step (`admit`, `preempt`, `ensure_free`) changes the accounting and records moves: copies, removals,
    saves and restores in llama.cpp's memory. `apply` executes them in the planned order.

    The memory may be recreated in the other layout: `move_all_out` before, `memory_recreated` after.
    """

    @property
    def attention_tile(self) -> int:
        """The tile of the context (`Context.attention_tile`); 1 on a GPU."""
        return 1 if self._on_gpu else self._memory.attention_tile

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

    def _shares_cells(self, match: Match) -> bool:
        return self.cache.sharing.shares_cells and match.source.seq_id >= 0

    # --- planning: changes the accounting; `apply` changes the memory -------------------------------------------------

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
        cache = self.cache
        has_none = self._places is None or not cache.host_bytes or cache.sharing.shares_prefixes or sequence.is_scored
        return not has_none and cache.wants(sequence)

    def _plan_checkpoints(self, sequence: Seq, branch: int) -> None:
        """Chooses where others will be able to reuse the prompt of a new sequence, which branches off another one at
        `branch`."""
        assert self._places
        prompt, start = sequence.tokens[: sequence.n_prompt], sequence.n_computed
        step = max(self._places.min_step, self._part_cost.tokens_for(_CHECKPOINT_SHARE))
        places = map(sequence.before_media, (*self._places.of_prompt(prompt, start, step), branch))
        least = max(self.cache.costs.min_cached, start + 1)
        for n in dict.fromkeys(places):
            if n >= least and not self.cache.has_checkpoint(prompt[:n], sequence.salt):
                sequence.stop_at(n)

    def _plan_swap_in(self, sequence: Seq) -> None:
        """Plans to restore the whole state. Then the sequence shares the cells of a prefix that is already in cells."""
        match = self.cache.longest_in_cells(sequence)
        if match and match.n < self.cache.costs.min_cached:
            match = None
        source, n = (match.source, match.n) if match else (None, 0)
        self._take_id(sequence, source)
        self.ensure_free(sequence.n_computed, keep=source)
        shared = self._cells.share(source.cells, n) if source else None
        sequence.cells = self._cells.grow(shared, sequence.n_computed - n) if n < sequence.n_computed else shared
        self.moves.add_swap_in(sequence, source, n)

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
            self.moves.add(self._save_copy, cached, cached.seq_id)
            self.cache.leave_cells(cached, for_host=True)
            cached.seq_id, cached.cells = -1, None
        else:
            self.cache.drop(cached)
        if n < cached.n_computed:
            self.cache.sharing.plan_truncation(self.moves, sequence, match.checkpoint)
        elif self._makes_checkpoints(sequence):
            self.moves.add(self._save_checkpoint, sequence.seq_id, cached.tokens, cached.salt)

    def _is_worth_keeping(self, cached: CachedPrefix, n: int) -> bool:
        """Whether to save a cached prefix before its cells are truncated to `n` tokens."""
        n_lost = cached.n_computed - n
        chance = CHANCE_OF_REUSE * n_lost / cached.n_computed
        return n_lost >= self.cache.costs.min_cached and self._save_cost.is_worth(cached.n_computed, chance)

    def _reuse_prefix(self, sequence: Seq, match: Match) -> None:
        source, n = match.source, match.n
        self._take_id(sequence, source)
        sequence.n_computed = n
        if self._shares_cells(match):
            sequence.cells = self._cells.share(source.cells, n)
        else:
            self.ensure_free(source.n_computed, keep=source)
            sequence.cells = self._cells.grow(None, n)
        self.cache.sharing.plan_reuse(self.moves, sequence, match)

    def _should_continue_in_place(self, match: Match) -> bool:
        """Whether the sequence takes over the cached prefix itself, instead of copying it or sharing its cells."""
        source = match.source
        if not isinstance(source, CachedPrefix) or source.seq_id < 0:
            return False
        if not self._free_ids and (len(self.cache.in_cells) == 1 or not self.cache.sharing.shares_prefixes):
            return True  # the only way to get a seq_id, or the only one without evicting another prefix
        return self.cache.sharing.continues_in_place(match.n, source.n_computed, of_slot=match.of_slot)

    def preempt(self, sequence: Seq, *, save: bool | None = None) -> None:
        """Takes cells and seq_id from a running sequence, which keeps its tokens and resumes later.

        `save`: whether to keep its state in host memory if there is room; None: if useful.
        """
        if save is None:  # a sequence that shares most of its cells will find them again as a prefix
            n = sequence.n_computed
            finds_again = self.cache.sharing.shares_prefixes and n_shared(sequence.cells) * 2 >= n
            save = not finds_again and self._save_cost.is_worth(n, chance=1.0)
        self.moves.add(self.moves.swap_out, sequence, sequence.seq_id, save=save)
        self.cache.forget(sequence)
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
        self.moves.add_relocation(old, sequence)

    def move_s(self, seq_id: int, sequence: Seq) -> float:
        """The estimated seconds of `move_to`: saving the prefix cached there, and saving and restoring the sequence's
        state, except on a GPU. 0 before any measurement."""
        cached = self._prefix_at(seq_id)
        save_s = self._save_cost.save_s(cached.n_computed) if cached else 0.0
        return save_s if self._on_gpu else save_s + self._save_cost.round_trip_s(sequence.n_computed)

    # --- after a step -------------------------------------------------------------------------------------------------

    def computed(self, sequence: Seq, n: int) -> None:
        """Marks the next `n` pending tokens of a sequence as computed."""
        sequence.cells = self._cells.grow(sequence.cells, n)
        sequence.computed(n)
        if sequence.prefill_stops and sequence.prefill_stops[0] <= sequence.n_computed:
            self._pass_stop(sequence)

    def _pass_stop(self, sequence: Seq) -> None:
        """Creates a checkpoint if the computed tokens end at a chosen place."""
        n = sequence.n_computed
        if n in sequence.prefill_stops and self._places and n <= sequence.n_exact:
            self._save_checkpoint(sequence.seq_id, sequence.tokens[:n], sequence.salt)
        sequence.prefill_stops = [stop for stop in sequence.prefill_stops if stop > n]

    def drop_draft(self, sequence: Seq) -> None:
        """Removes the draft tokens that a step has computed after the sequence's computed ones."""
        if not self._memory.remove(sequence.seq_id, sequence.n_positions):
            self.moves.recompute(sequence, LlamaError("its draft tokens cannot be removed"))

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
            keep = keep and n >= self.cache.costs.min_cached and self.cache.wants(sequence)
            if keep and n < sequence.n_computed and (keep := self._memory.remove(sequence.seq_id, sequence.span(n))):
                sequence.cells, sequence.n_computed = self._cells.cut(sequence.cells, n), n
            if keep:
                self._keep_as_prefix(sequence)
            else:
                self._memory.remove(sequence.seq_id)
                self.cache.forget(sequence)
                self._free_cells_and_id(sequence)
        self.moves.drop_saved(sequence)

    def _keep_as_prefix(self, sequence: Seq) -> None:
        tokens = sequence.tokens[: sequence.n_computed].copy()
        if sequence.request.id_slot >= 0:
            self.cache.assign_slot(sequence.request.id_slot, tokens, sequence.salt)
        cached = CachedPrefix(tokens, sequence.salt, sequence.seq_id, sequence.cells, sequence.n_positions)
        self.cache.forget(sequence)
        del self.running[sequence.seq_id]
        sequence.seq_id, sequence.cells = -1, None
        for redundant in self.cache.add(cached):
            if self.cache.sharing.has_parts and redundant.seq_id >= 0:
                self._save_checkpoint(redundant.seq_id, redundant.tokens, redundant.salt)
            self._drop(redundant)
        if cached in self.cache.in_cells:
            self._limit_cached_cells(cached)
        self.apply()
        if self.cache.tier:
            self.cache.tier.kept(cached)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `AssertionError` if the accounting is inconsistent or does not match llama.cpp's memory."""
        seq_ids = [*self._free_ids, *self._cache_only_ids]
        check_invariants(self._memory, self._cells.n_used, self.running, self.cache, seq_ids)
        require(self.n_free >= 0, f"{self._cells.n_used} cells are used of {self.n_cells}")
        require(self.moves.is_empty, "planned moves were not applied")
        swapped = self.moves.swapped_bytes
        require(0 <= swapped <= self.moves.swap_bytes, f"{swapped} bytes are swapped out")

    def dump(self) -> str:
        """The holder of each seq_id, for the log."""
        seq_ids = [*self._free_ids, *self._cache_only_ids]
        return dump_cells(self._memory, self._cells.n_used, self.running, self.cache, seq_ids)

    def rebuild(self) -> None:
        """Empties llama.cpp's memory and resets the accounting."""
        self._memory.clear()
        self._free_all()
        self.moves.reset()
        self.cache.clear()
