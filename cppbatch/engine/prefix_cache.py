"""Which prefix a new sequence can take from others, and what finished ones leave behind."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from cppbatch.config import Sharing
from cppbatch.engine.cells import Span
from cppbatch.engine.radix_tree import RadixTree, Tokens
from cppbatch.engine.sequence import SavedState, Seq, SeqStatus

_WORTH_WAITING = 24  # tokens: a longer prefix that is being computed is waited for, a shorter one computed again
_COST_OF_TAKING, _COST_OF_COPYING = 4, 16  # tokens: a shorter prefix is as soon computed
_COPIED_AT_ONCE = 100  # tokens copied in the time that one takes to compute, cautiously (DESIGN.md: 200)


class CachedPrefix:
    """Tokens that a finished sequence has computed: in cells (`seq_id` >= 0) or saved in host memory."""

    __slots__ = ("cells", "salt", "saved", "seq_id", "tokens")

    def __init__(self, tokens: Tokens, salt: Hashable, seq_id: int, cells: Span | None) -> None:
        self.tokens = tokens
        self.salt = salt
        self.seq_id = seq_id
        self.cells = cells
        self.saved: SavedState | None = None

    @property
    def n_computed(self) -> int:
        """How many tokens it has."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix to take: the first `n` tokens of `source`."""

    source: Seq | CachedPrefix
    n: int


class PrefixCache:
    """Running sequences and finished ones by their tokens. Decides; `KVPool` moves the memory.

    `host_bytes`: host memory for what had to leave its cells.
    """

    def __init__(self, sharing: Sharing, *, host_bytes: int) -> None:
        self.sharing = sharing
        self.host_bytes = host_bytes
        self.used_host_bytes = 0
        self.queries = self.hits = self.hit_tokens = 0
        self._tree: RadixTree[Seq | CachedPrefix] = RadixTree()
        # Both with the least recently used first.
        self.in_cells: dict[CachedPrefix, None] = {}
        self.in_host: dict[CachedPrefix, None] = {}

    # --- running sequences --------------------------------------------------------------------------------------

    def wants(self, sequence: Seq) -> bool:
        """Whether this sequence takes from the cache and leaves to it."""
        return self.sharing != "none" and sequence.request.cache_prompt

    def track(self, sequence: Seq) -> None:
        """Offers a running sequence's known tokens to others."""
        if self.wants(sequence):
            tokens = sequence.tokens[: sequence.n_tokens].copy()  # parts of which may outlive the sequence in the tree
            self._tree.insert(sequence, tokens, sequence.salt)

    def forget(self, sequence: Seq) -> None:
        """Its memory is about to go."""
        self._tree.discard(sequence)

    def find(self, sequence: Seq) -> tuple[Match | None, bool]:
        """The longest prefix that others have computed, and whether it is worth waiting for a longer one.

        At least the last token is left to compute: its logits are wanted.
        """
        best, best_gain = None, 0
        ahead, coming = None, 0
        if not self.wants(sequence) or sequence.is_scored:
            return None, False
        tokens = sequence.tokens[: sequence.n_tokens - 1]
        for source, n in self._tree.matches(tokens, sequence.salt):
            if n <= best_gain:
                break
            usable = self._usable(source, n)
            if usable - self._cost(source) > best_gain:
                best, best_gain = Match(source, usable), usable - self._cost(source)
            if isinstance(source, Seq) and coming < n > source.n_computed and self._comes_first(source, sequence):
                ahead, coming = source, n
        # Once part of it is there, the rest is: it comes no later than it could be computed again.
        on_its_way = best is not None and best.source is ahead
        if ahead is None or not (on_its_way or coming >= best_gain + _WORTH_WAITING):
            return best, False
        if self.sharing == "whole":
            ahead.pause_at = min(ahead.pause_at or coming, coming)  # what it has then is what can be copied
        return best, True

    @staticmethod
    def _comes_first(source: Seq, sequence: Seq) -> bool:
        """Whether its prompt is being read, and before the other's would be: else waiting may take for ever."""
        return source.status is SeqStatus.PREFILL and source.rank < sequence.rank

    def _cost(self, source: Seq | CachedPrefix) -> int:
        """What it costs to take it, in tokens that could be computed instead: all of it is copied, or nothing."""
        shares_cells = self.sharing == "cells" and source.seq_id >= 0
        return _COST_OF_TAKING if shares_cells else _COST_OF_COPYING + source.n_computed // _COPIED_AT_ONCE

    def _usable(self, source: Seq | CachedPrefix, n: int) -> int:
        if isinstance(source, Seq) and source.moving:
            return 0
        if self.sharing == "whole":
            return source.n_computed if source.n_computed <= n else 0
        return min(source.n_computed, n)

    def count(self, sequence: Seq, match: Match | None) -> None:
        """Notes that a sequence was admitted, and with which prefix."""
        self.queries += self.wants(sequence)
        if match:
            self.hits += 1
            self.hit_tokens += match.n
            sequence.n_cached = match.n
            self._touch(match.source)

    def uncount(self, sequence: Seq) -> None:
        """What it was to take could not be had."""
        self.hits -= sequence.n_cached > 0
        self.hit_tokens -= sequence.n_cached
        sequence.n_cached = 0

    def _touch(self, source: Seq | CachedPrefix) -> None:
        for place in (self.in_cells, self.in_host):
            if isinstance(source, CachedPrefix) and source in place:
                del place[source]
                place[source] = None  # the most recently used now

    # --- finished ones ------------------------------------------------------------------------------------------

    def add(self, cached: CachedPrefix) -> list[CachedPrefix]:
        """Keeps what a finished sequence left. Returns those that are of no use now, perhaps itself."""
        self._tree.insert(cached, cached.tokens, cached.salt)
        self.in_cells[cached] = None
        same_length = self.sharing == "whole"  # a shorter one is a checkpoint of its own there
        in_cells = [other for other in self._tree.covers(cached) if other.seq_id >= 0 and not same_length]
        if any(other.n_computed >= len(cached.tokens) for other in in_cells):
            return [cached]
        covered = [other for other in self._tree.covered_by(cached) if isinstance(other, CachedPrefix)]
        return [other for other in covered if not same_length or len(other.tokens) == len(cached.tokens)]

    def drop(self, cached: CachedPrefix) -> None:
        """Forgets it; its cells are the pool's affair."""
        self._tree.discard(cached)
        self.in_cells.pop(cached, None)
        self.in_host.pop(cached, None)
        if cached.saved:
            self.used_host_bytes -= cached.saved.n_bytes
            cached.saved = None

    def leave_cells(self, cached: CachedPrefix) -> None:
        """It is on its way to host memory, where it can be found from now on; `keep_in_host` follows."""
        del self.in_cells[cached]
        if self.host_bytes:
            self.in_host[cached] = None
        else:
            self.drop(cached)

    def keep_in_host(self, cached: CachedPrefix, saved: SavedState | None) -> None:
        """Takes the memory of what has left its cells, dropping the least recently used for it, or itself."""
        if saved is None or saved.n_bytes > self.host_bytes:
            self.drop(cached)
            return
        while self.used_host_bytes + saved.n_bytes > self.host_bytes:
            self.drop(next(other for other in self.in_host if other.saved))
        cached.saved = saved
        self.used_host_bytes += saved.n_bytes

    def clear(self) -> None:
        """Forgets everything, running sequences too."""
        self.used_host_bytes = 0
        self._tree = RadixTree()
        self.in_cells, self.in_host = {}, {}
