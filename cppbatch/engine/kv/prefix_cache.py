"""Chooses the prefix that a new sequence reuses, and the prefixes of finished sequences to keep."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from cppbatch.engine.kv.cached_prefix import CachedPrefix, Checkpoint, Match, Salt, Source
from cppbatch.engine.kv.checkpoints import StateWithParts
from cppbatch.engine.kv.prefix_tier import PrefixTier
from cppbatch.engine.kv.radix_tree import RadixTree, Tokens
from cppbatch.engine.kv.sharing import PrefixSharing
from cppbatch.engine.sequence import SavedState, Seq, SeqStatus

_NEVER_REUSED = 4  # factor on the age of an entry that has never been reused
_MAX_HOST_PREFIXES = 4096  # with checkpoints, in host memory: a lookup may iterate over all of them, in half a ms
_COPIED_AT_ONCE = 100  # tokens copied in the time to compute one; measured: about 200


class ReuseCosts(NamedTuple):
    """What the reuse of a prefix costs, in computed tokens."""

    share: int = 4
    copy: int = 16
    min_cached: int = 20
    """Computing a shorter prefix is as fast as reusing it."""
    worth_waiting: int = 24
    """A sequence waits for a prefix being computed if it saves this many more tokens than the best one now."""


REUSE_COSTS = ReuseCosts()


class PrefixCache:
    """Finds prefixes among running sequences and cached prefixes. Only decides: `KVPool` moves the memory.

    `find` chooses the source of a prefix for a new sequence; `add` decides what is redundant when a sequence finishes;
    the order of `in_cells` is the order of eviction. `host_bytes`: host memory for checkpoints, and for prefixes
    evicted from cells.
    """

    def __init__(
        self,
        sharing: PrefixSharing,
        *,
        host_bytes: int,
        tier: PrefixTier | None = None,
        costs: ReuseCosts = REUSE_COSTS,
    ) -> None:
        """`tier`: the one below host memory."""
        self.sharing = sharing
        self.costs = costs
        self.tier = tier
        self.host_bytes = host_bytes
        self.used_host_bytes = 0
        self.queries = self.hits = self.hit_tokens = 0
        self._tree: RadixTree[Source] = RadixTree()
        self._checkpoint_tree: RadixTree[Checkpoint] = RadixTree()
        # All are ordered least recently used first.
        self.in_cells: dict[CachedPrefix, None] = {}
        self.in_host: dict[CachedPrefix, None] = {}
        self.checkpoints: dict[Checkpoint, None] = {}
        self.slots: dict[int, tuple[Tokens, Salt]] = {}
        """The computed tokens and the salt of each slot's last request (`id_slot`)."""

    # --- running sequences --------------------------------------------------------------------------------------

    def wants(self, sequence: Seq) -> bool:
        """Whether this sequence uses the cache: reuses a prefix, and leaves its own tokens as one."""
        return self.sharing.reuses and sequence.request.cache_prompt

    def track(self, sequence: Seq) -> None:
        """Offers the known tokens of this running sequence to others, until a context shift."""
        if self.wants(sequence):
            # A copy, because parts may outlive the sequence in the tree.
            tokens = sequence.tokens[: min(sequence.n_tokens, sequence.n_exact)].copy()
            self._tree.insert(sequence, tokens, sequence.salt)

    def forget(self, sequence: Seq) -> None:
        """Stops offering the tokens of this sequence to others."""
        self._tree.discard(sequence)

    def find(self, sequence: Seq) -> tuple[Match | None, bool]:
        """The best prefix to reuse now, and whether the sequence should wait because a better one is being computed.

        The best prefix saves the most tokens, minus the cost of reusing it. The last token is always computed, because
        its logits are needed. `sequence` waits if a sequence of earlier rank is computing a prefix that is better by
        `worth_waiting` tokens. It also waits if that sequence is already the best source: reusing more of it later is
        never slower than recomputing the rest. So two equal new prompts, or `n` choices of one, are computed once. It
        also waits while a longer prefix is read from disk.
        """
        best, best_gain = None, 0
        ahead, coming = None, 0
        if not self.wants(sequence) or sequence.is_scored:
            return None, False
        tokens = sequence.tokens[: sequence.n_tokens - 1]
        own = self.of_slot(sequence.request.id_slot)
        checkpoints = self._checkpoints_along(tokens, sequence.salt)
        for source, n_equal in self._tree.matches(tokens, sequence.salt):
            n = sequence.before_media(n_equal)
            if n <= best_gain:
                break
            usable, checkpoint = self._usable(source, n, checkpoints)
            if (whole := sequence.before_media(usable)) < usable:  # the source is computing an image
                usable = whole if self.sharing.shares_prefixes else 0
            gain = usable - (self.costs.share if source is own else self._cost(source, usable))
            if gain > best_gain:
                is_cut = checkpoint is None and usable < source.n_computed
                best, best_gain = Match(source, usable, checkpoint, is_cut, of_slot=source is own), gain
            if isinstance(source, Seq) and n > max(coming, source.n_computed) and self._comes_first(source, sequence):
                ahead, coming = source, n
        best_is_ahead = best is not None and best.source is ahead
        if ahead is None or not (best_is_ahead or coming >= best_gain + self.costs.worth_waiting):
            return best, self.tier is not None and self.tier.is_coming(sequence, best.n if best else 0)
        if not self.sharing.shares_prefixes:  # its prefill stops there, so that the prefix equals its computed tokens
            ahead.stop_at(coming)
        return best, True

    def branch(self, sequence: Seq) -> int:
        """The maximum number of tokens that a sequence shares with another one or with a cached prefix."""
        tokens = sequence.tokens[: sequence.n_tokens - 1]
        return next((sequence.before_media(n) for _, n in self._tree.matches(tokens, sequence.salt)), 0)

    def _checkpoints_along(self, tokens: Tokens, salt: Salt) -> list[Checkpoint]:
        """The checkpoints along these tokens, longest first."""
        found = self._checkpoint_tree.matches(tokens, salt)
        return [checkpoint for checkpoint, n in found if n == len(checkpoint.tokens)]

    def longest_in_cells(self, sequence: Seq) -> Match | None:
        """The longest prefix of a sequence's computed tokens whose cells it can share, if cells can be shared."""
        best: Match | None = None
        if not (self.sharing.shares_any_cells and self.wants(sequence)):
            return None
        n_most = min(sequence.n_computed, sequence.n_exact)
        for source, n in self._tree.matches(sequence.tokens[:n_most], sequence.salt):
            if best and n <= best.n:
                break
            n_shared = sequence.before_media(min(n, source.n_computed))
            if source.seq_id >= 0 and n_shared > (best.n if best else 0):
                best = Match(source, n_shared)
        return best

    @staticmethod
    def _comes_first(source: Seq, sequence: Seq) -> bool:
        """Whether `sequence` may wait for `source`: `source` is in prefill and has an earlier rank, so that the wait
        ends."""
        return source.status is SeqStatus.PREFILL and source.rank < sequence.rank

    def _cost(self, source: Source, n: int) -> int:
        """The time to reuse `n` tokens, in computed tokens. A copy has all tokens of the source."""
        stays = isinstance(source, CachedPrefix) and self.sharing.continues_in_place(n, source.n_computed)
        is_copied = source.seq_id < 0 or not (stays or self.sharing.shares_any_cells)
        return self.costs.copy + source.n_computed // _COPIED_AT_ONCE if is_copied else self.costs.share

    def _usable(self, source: Source, n: int, checkpoints: list[Checkpoint]) -> tuple[int, Checkpoint | None]:
        """How many of the first `n` tokens can currently be reused from the source, and the required checkpoint.

        `checkpoints`: those of these tokens, longest first.
        """
        if isinstance(source, Seq) and source.moving:
            return 0, None
        if self.sharing.shares_prefixes or source.n_computed <= n:
            return min(source.n_computed, n), None
        return self.sharing.usable(source, n, checkpoints)

    def count(self, sequence: Seq, match: Match | None) -> None:
        """Counts a query and, with a match, a hit. Makes the source the most recently used."""
        self.queries += self.wants(sequence)
        if match:
            self.hits += 1
            self.hit_tokens += match.n
            sequence.n_cached = match.n
            if isinstance(match.source, CachedPrefix):
                match.source.n_reused = max(match.source.n_reused, match.n)
                self._touch(match.source)
            if (checkpoint := match.checkpoint) in self.checkpoints:
                checkpoint.was_reused = True
                self._use_checkpoint(checkpoint)

    def uncount(self, sequence: Seq) -> None:
        """Reverts the hit of a sequence whose prefix could not be copied."""
        self.hits -= sequence.n_cached > 0
        self.hit_tokens -= sequence.n_cached
        sequence.n_cached = 0

    def _touch(self, cached: CachedPrefix) -> None:
        cached.used_at = self.queries
        for prefixes in (self.in_cells, self.in_host):
            if cached in prefixes:
                del prefixes[cached]
                prefixes[cached] = None  # moves it to the end: most recently used

    # --- cached prefixes ----------------------------------------------------------------------------------------

    def add(self, cached: CachedPrefix) -> list[CachedPrefix]:
        """Adds the prefix of a finished sequence. Returns the now redundant prefixes, possibly including this one."""
        self._tree.insert(cached, cached.tokens, cached.salt)
        self.in_cells[cached] = None
        cached.used_at = self.queries
        only_whole = self.sharing.only_whole  # so a shorter prefix is not redundant
        longer = [other for other in self._tree.covers(cached) if other.seq_id >= 0 and not only_whole]
        if any(other.n_computed >= len(cached.tokens) for other in longer):
            return [cached]
        covered = [other for other in self._tree.covered_by(cached) if isinstance(other, CachedPrefix)]
        if self.sharing.has_parts:  # other sequences can only be truncated to their ends if there are checkpoints
            covered = [other for other in covered if other.seq_id >= 0 or self.has_checkpoint(other.tokens, other.salt)]
        return [other for other in covered if not only_whole or len(other.tokens) == len(cached.tokens)]

    def assign_slot(self, slot: int, tokens: Tokens, salt: Salt) -> None:
        """Sets the tokens and the salt of a slot's last request.

        Two other slots are looked at, and forgotten if their prefix was evicted: clients may use any number of slots.
        """
        for other in list(islice(self.slots, 2)):
            is_cached, entry = self.of_slot(other) is not None, self.slots.pop(other)
            if is_cached:
                self.slots[other] = entry
        self.slots[slot] = tokens, salt

    def of_slot(self, slot: int) -> CachedPrefix | None:
        """The shortest cached prefix that starts with all tokens of a slot's last request; None if it was evicted, or
        if the slot had no request."""
        if slot not in self.slots:
            return None
        tokens, salt = self.slots[slot]
        matches = [source for source, n in self._tree.matches(tokens, salt) if n == len(tokens)]
        prefixes = [cached for cached in matches if isinstance(cached, CachedPrefix)]
        return min(prefixes, key=lambda cached: len(cached.tokens), default=None)

    def n_elsewhere(self, cached: CachedPrefix) -> int:
        """How many of its first tokens others have computed as well, if sequences can reuse any prefix of them."""
        most = 0
        for other, n in self._tree.matches(cached.tokens, cached.salt) if self.sharing.shares_prefixes else ():
            if n <= most:
                break
            if other is not cached:
                most = max(most, min(n, other.n_computed))
        return most

    def add_to_host(self, cached: CachedPrefix, saved: SavedState) -> None:
        """Adds a prefix whose state is in host memory, if it fits."""
        self._tree.insert(cached, cached.tokens, cached.salt)
        self.in_host[cached] = None
        self.keep_in_host(cached, saved)

    def drop(self, cached: CachedPrefix) -> None:
        """Removes a cached prefix. The caller frees its cells."""
        self._tree.discard(cached)
        self.in_cells.pop(cached, None)
        self.in_host.pop(cached, None)
        cached.is_dropped = True
        if cached.saved:
            self.used_host_bytes -= cached.saved.n_bytes
            cached.saved = None

    def leave_cells(self, cached: CachedPrefix, *, for_host: bool) -> None:
        """Marks a prefix as being saved to host memory, where it counts from now on; `keep_in_host` follows.

        If not `for_host`, or without host memory for prefixes, it is dropped.
        """
        del self.in_cells[cached]
        if self.host_bytes and for_host:
            self.in_host[cached] = None
        else:
            self.drop(cached)

    def keep_in_host(self, cached: CachedPrefix, saved: SavedState | None) -> None:
        """Stores the saved state of a prefix evicted from cells.

        Drops the least recently used prefixes until it fits, or this one if it was not saved or can never fit.
        """
        if saved is None or saved.n_bytes > self.host_bytes:
            self.drop(cached)
            return
        self._make_room(saved.n_bytes)
        cached.saved = saved
        cached.used_at = self.queries
        self.used_host_bytes += saved.n_bytes

    def _make_room(self, n_bytes: int) -> None:
        """Drops prefixes and checkpoints in host memory until `n_bytes` are free, and their number is within the limit.

        First those that save few tokens for their bytes, have not been used for long, and were never reused.
        """
        while (
            self.used_host_bytes + n_bytes > self.host_bytes
            or len(self.in_host) + len(self.checkpoints) >= _MAX_HOST_PREFIXES
        ):
            held: list[CachedPrefix | Checkpoint] = [other for other in self.in_host if other.saved]
            victim = max([*held, *self.checkpoints], key=self._worthless, default=None)
            if victim is None:
                return
            if isinstance(victim, Checkpoint):
                self.drop_checkpoint(victim)
            else:
                if self.tier and victim.saved:
                    self.tier.dropped(victim, self.with_parts(victim, victim.saved))
                self.drop(victim)

    def _worthless(self, held: CachedPrefix | Checkpoint) -> float:
        assert held.saved
        age = (1 + self.queries - held.used_at) * (1 if held.was_reused else _NEVER_REUSED)
        return age * held.saved.n_bytes / len(held.tokens)

    @property
    def n_checkpoints(self) -> int:
        """Checkpoints in host memory. For a model with only states, these are the cached prefixes there."""
        return len(self.in_host if self.sharing.only_whole else self.checkpoints)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the last used checkpoint; 0: no checkpoint."""
        whole = self.sharing.only_whole
        held: list[CachedPrefix | Checkpoint] = [*(self.in_host if whole else self.checkpoints)]
        last = held[-1] if held else None
        return last.saved.n_bytes if last and last.saved else 0

    # --- checkpoints --------------------------------------------------------------------------------------------

    def has_checkpoint(self, tokens: Tokens, salt: Salt) -> bool:
        """Whether there is a checkpoint of exactly these tokens (for a model with only states: a cached prefix). Makes
        it the most recently used."""
        if self.sharing.only_whole:
            same = [s for s, n in self._tree.matches(tokens, salt) if isinstance(s, CachedPrefix) and n == len(tokens)]
            exact = next((cached for cached in same if cached.n_computed == len(tokens)), None)
            if exact:
                self._touch(exact)
            return exact is not None
        checkpoint = next(iter(self._checkpoints_along(tokens, salt)), None)
        if checkpoint is None or len(checkpoint.tokens) < len(tokens):
            return False
        self._use_checkpoint(checkpoint)
        return True

    def with_parts(self, cached: CachedPrefix, state: SavedState) -> SavedState:
        """The state of a cached prefix with those of its checkpoints, longest first, which may take up to as many bytes
        as the state itself."""
        parts, free_bytes = [], state.n_bytes
        for checkpoint in self._checkpoints_along(cached.tokens, cached.salt):
            free_bytes -= checkpoint.n_bytes
            if free_bytes >= 0:
                parts.append((len(checkpoint.tokens), checkpoint.saved))
        return StateWithParts(state, parts) if parts else state

    def _use_checkpoint(self, checkpoint: Checkpoint) -> None:
        checkpoint.used_at = self.queries
        del self.checkpoints[checkpoint]
        self.checkpoints[checkpoint] = None  # moves it to the end: most recently used

    def add_checkpoint(self, tokens: Tokens, salt: Salt, saved: SavedState) -> None:
        """Adds a checkpoint, if it fits into host memory. The array must not change afterwards."""
        if self.sharing.only_whole:
            self.add_to_host(CachedPrefix(tokens, salt, -1, None), saved)
            return
        checkpoint = Checkpoint(tokens, salt, saved, self.queries)
        if checkpoint.n_bytes > self.host_bytes:
            return
        self._make_room(checkpoint.n_bytes)
        self.used_host_bytes += checkpoint.n_bytes
        self.checkpoints[checkpoint] = None
        self._checkpoint_tree.insert(checkpoint, tokens, salt)

    def keep_part(self, sequence: Seq, part: SavedState) -> None:
        """Makes the part that a sequence got a checkpoint of its computed tokens, unless it exists."""
        tokens = sequence.tokens[: sequence.n_computed]
        if not self.has_checkpoint(tokens, sequence.salt):
            self.add_checkpoint(tokens.copy(), sequence.salt, part)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Removes a checkpoint. Sequences that are about to use it keep it."""
        del self.checkpoints[checkpoint]
        self._checkpoint_tree.discard(checkpoint)
        self.used_host_bytes -= checkpoint.n_bytes

    def clear(self) -> None:
        """Removes everything, including running sequences."""
        for cached in (*self.in_cells, *self.in_host):
            cached.is_dropped = True
        self.used_host_bytes = 0
        self._tree, self._checkpoint_tree = RadixTree(), RadixTree()
        self.in_cells, self.in_host, self.checkpoints = {}, {}, {}
        self.slots = {}
