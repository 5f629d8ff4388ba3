"""The interface of a cache tier below host memory: the pool calls the tier, which never calls the pool."""

from __future__ import annotations

from typing import Protocol

import msgspec

from cppbatch.engine.kv.cached_prefix import CachedPrefix
from cppbatch.engine.sequence import SavedState, Seq


class TierLimits(msgspec.Struct, frozen=True):
    """Which prefixes of a tier the pool can use."""

    whole: bool = False
    """Whether a prefix can only be used up to a checkpoint, or with all of its tokens."""
    n_bytes: int = 1 << 62
    """The maximum size of a state in host memory."""
    n_tokens: int = 1 << 31
    """The maximum number of tokens of a state, which is restored whole."""


class TierCounts(msgspec.Struct):
    """Counters for the prefixes of a tier, since the start of the engine."""

    hits: int = 0
    """Sequences for which a prefix was read."""
    hit_tokens: int = 0
    """Prompt tokens that these sequences could reuse."""
    read_bytes: int = 0
    written_bytes: int = 0
    damaged: int = 0
    """Deleted files that were damaged or did not match their name."""
    entries: int = 0
    """Current prefixes that this engine can use."""


class PrefixTier(Protocol):
    """Cached prefixes below host memory, as the pool sees them."""

    counts: TierCounts

    def set_limits(self, limits: TierLimits) -> None: ...  # at first, and after a switch of the layout
    def is_coming(self, sequence: Seq, n: int) -> bool: ...  # whether it should wait for more than `n` tokens
    def kept(self, cached: CachedPrefix) -> None: ...  # a finished sequence has left this prefix in the cache
    def dropped(self, cached: CachedPrefix, state: SavedState) -> None: ...  # host memory is about to drop it
