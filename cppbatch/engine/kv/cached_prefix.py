"""What the prefix cache holds and finds: prefixes, checkpoints, and matches for new sequences."""

from __future__ import annotations

import msgspec

from cppbatch.engine.cells import Span
from cppbatch.engine.kv.radix_tree import Tokens
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.sequence import SavedState, Seq

Salt = tuple[str, AdapterSet]
"""A request's `cache_salt` and LoRA adapters: only prefixes with an equal salt are shared."""


class CachedPrefix:
    """The computed tokens of a finished sequence: in cells (`seq_id` >= 0) or saved in host memory (`saved`)."""

    __slots__ = ("cells", "is_dropped", "n_positions", "n_reused", "salt", "saved", "seq_id", "tokens", "used_at")

    def __init__(
        self, tokens: Tokens, salt: Salt, seq_id: int, cells: Span | None, n_positions: int | None = None
    ) -> None:
        """`n_positions`: the positions of the tokens (`Seq.span`); None: not in cells, or one per token."""
        self.tokens = tokens
        self.n_positions = len(tokens) if n_positions is None else n_positions
        self.salt = salt
        self.seq_id = seq_id
        self.cells = cells
        self.saved: SavedState | None = None
        self.n_reused = 0
        """The maximum number of its tokens that a sequence has reused."""
        self.used_at = 0
        """The number of the last query that used it."""
        self.is_dropped = False
        """Whether it is no longer cached."""

    @property
    def n_computed(self) -> int:
        """The number of its tokens, which are all computed."""
        return len(self.tokens)

    @property
    def was_reused(self) -> bool:
        """Whether a sequence has reused tokens of it."""
        return self.n_reused > 0


class Checkpoint(msgspec.Struct, eq=False):
    """The memory of these tokens that cannot be truncated: the cells of sliding windows, recurrent states.

    Allows a sequence with their full-attention cells, and later ones, to return to their end. Only with
    `CheckpointSharing`; models with only states have a `CachedPrefix` instead.
    """

    tokens: Tokens
    salt: Salt
    saved: SavedState
    used_at: int
    was_reused: bool = False

    @property
    def n_bytes(self) -> int:
        """Size in host memory."""
        return self.saved.n_bytes + self.tokens.nbytes


Source = Seq | CachedPrefix
"""A running sequence or a cached prefix: where others can take a prefix from."""


class Match(msgspec.Struct, frozen=True):
    """A prefix to reuse: the first `n` tokens of `source`."""

    source: Source
    n: int
    checkpoint: Checkpoint | None = None
    """Restores memory that cannot be truncated. None: it can, or `n` covers all computed tokens of the source."""
    is_cut: bool = False
    """Whether the source, or a copy of it, is truncated without a checkpoint."""
    of_slot: bool = False
    """Whether the source is the prefix of the requested slot (`id_slot`), which may be truncated."""
