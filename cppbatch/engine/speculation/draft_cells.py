"""The cells of a draft context: one draft sequence per seq_id.

The cells follow the sequences lazily: a draft sequence is compared with its sequence when drafting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.cells import Cells, Span
from cppbatch.engine.kv.radix_tree import n_common
from cppbatch.engine.sequence import Seq
from cppbatch.errors import LlamaError

Tokens = npt.NDArray[np.int32]

JOINED = 8
"""Tokens that are computed with the first draft tokens, or just before them, which costs no more than a step that is
needed anyway: more are read earlier, or taken from another sequence."""


class DraftMemory(Protocol):
    """The cells of a draft context, in the unified layout (`cppbatch.llama.Context`)."""

    n_ctx: int
    n_seq_max: int

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool: ...
    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None: ...
    def clear(self) -> None: ...


class DraftSequence:
    """A seq_id of the draft context. Its cells hold `tokens[start:n_known]`, then `guessed`."""

    __slots__ = ("guessed", "may_share", "n_known", "salt", "seq_id", "sequence", "start", "tip", "tokens", "used_at")

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.sequence: Seq | None = None  # None: it has ended; its cells are kept as a prefix for others
        self.tokens: Tokens = np.empty(0, np.int32)  # the sequence's own array, which only grows
        self.start = 0  # but for heads: position 0
        self.n_known = 0
        self.guessed: list[int] = []
        self.salt = ""
        self.may_share = False
        self.tip: Span | None = None
        self.used_at = 0

    @property
    def n_cells(self) -> int:
        """Cells that it holds, including shared ones."""
        return self.n_known - self.start + len(self.guessed)

    @property
    def n_shareable(self) -> int:
        """Cells of known tokens."""
        return self.n_known - self.start

    @property
    def position(self) -> int:
        """The position after its last cell."""
        return self.n_known + len(self.guessed)

    @property
    def n_missing(self) -> int:
        """Tokens of its sequence to compute before drafting: one if it is up to date."""
        assert self.sequence
        return self.sequence.n_tokens - self.n_known


class DraftCells:
    """Gives each sequence a seq_id of the draft context, and counts the cells.

    A new sequence starts with the longest prefix held by other draft sequences. If seq_ids or cells run out, the least
    recently used draft sequences lose theirs: those of finished, preempted and swapped sequences.
    """

    def __init__(
        self, memory: DraftMemory, *, first_computable: Callable[[Seq], int] | None = None, keeps_guesses: bool = True
    ) -> None:
        """`first_computable`: the first token of a sequence that can be computed now; None: any can. Cells before it
        can only be shared. `keeps_guesses`: cells of accepted draft tokens are as valid as computed ones."""
        self._memory = memory
        self._first_computable = first_computable
        self._keeps_guesses = keeps_guesses
        self.forget()

    def forget(self) -> None:
        """Resets the accounting for empty memory."""
        self._cells = Cells()
        self.all = [DraftSequence(seq_id) for seq_id in range(self._memory.n_seq_max)]
        self._of: dict[Seq, DraftSequence] = {}
        self._now = 0  # counts the calls of `follow`

    @property
    def n_free(self) -> int:
        """Cells not held by any draft sequence."""
        return self._memory.n_ctx - self._cells.n_used

    def get(self, sequence: Seq) -> DraftSequence | None:
        """The draft sequence of a sequence, if any."""
        return self._of.get(sequence)

    def follow(self, sequences: Iterable[Seq]) -> list[DraftSequence]:
        """The draft sequences of these, at most one per seq_id. Their cells only hold known tokens, except the last
        one."""
        sequences = list(sequences)
        self._now += 1
        for sequence in sequences:
            if known := self._of.get(sequence):
                known.used_at = self._now
                self._drop_wrong_guesses(known, sequence)
        found = [self._of.get(sequence) or self._claim(sequence) for sequence in sequences]
        if self._first_computable:
            firsts = {draft: self._first_computable(sequence) for draft, sequence in zip(found, sequences, strict=True)}
            for draft, first in firsts.items():
                if draft.n_known < first:
                    self._restart_cells(draft, first, [each for each in found if firsts[each] <= each.n_known < first])
        return found

    def _restart_cells(self, draft: DraftSequence, first: int, unread: list[DraftSequence]) -> None:
        """Replaces cells that end before the first token that can be computed by others, which may start there. It has
        none while its prefix is still to be computed by one of `unread`."""
        assert draft.sequence
        source, n = self._longest_prefix(draft.sequence, 0, least=first)
        self._cut(draft, 0)
        if source:
            self._share(source, draft, n)
        elif not any(_have_prefix(draft, each, first) for each in unread):
            draft.start = draft.n_known = first

    def _drop_wrong_guesses(self, draft: DraftSequence, sequence: Seq) -> None:
        guessed = np.asarray(draft.guessed if self._keeps_guesses else [], np.int32)
        right = n_common(guessed, sequence.tokens[draft.n_known : sequence.n_tokens])
        self._cut(draft, min(draft.n_known + right, sequence.n_tokens - 1))

    def _claim(self, sequence: Seq) -> DraftSequence:
        idle = [draft for draft in self.all if draft.used_at < self._now]
        draft = min(idle, key=lambda each: (each.n_cells > 0, each.used_at))
        least = self._first_computable(sequence) if self._first_computable else 0
        source, n = self._longest_prefix(sequence, 0, least=least)
        if source and source.sequence is None and source in idle:
            draft = source
        self._keep(draft, n if draft is source else 0)
        draft.sequence, draft.tokens = sequence, sequence.tokens
        draft.salt, draft.may_share = sequence.request.cache_salt, sequence.request.cache_prompt
        draft.used_at = self._now
        self._of[sequence] = draft
        if source and draft is not source:
            self._share(source, draft, n)
        return draft

    def share_more(self, draft: DraftSequence) -> None:
        """Lets it share the cells of a longer prefix, if another one has computed one meanwhile."""
        assert draft.sequence
        source, n = self._longest_prefix(draft.sequence, draft.n_shareable, least=draft.n_known)
        if source:
            self._cut(draft, 0)
            self._share(source, draft, n)

    def _longest_prefix(self, sequence: Seq, n_have: int, *, least: int) -> tuple[DraftSequence | None, int]:
        """The draft sequence with the most cells of these tokens, and the token at which they end, at least `least`;
        None if the gain is too small. `n_have`: cells that it already has."""
        request = sequence.request
        best, most = None, n_have + JOINED
        if not request.cache_prompt:
            return None, 0
        known = sequence.tokens[: sequence.n_tokens - 1]
        for draft in self.all:
            if draft.n_shareable > most and draft.may_share and draft.salt == request.cache_salt:
                n = n_common(draft.tokens[: draft.n_known], known)
                if n >= least and n - draft.start > most:
                    best, most = draft, n - draft.start
        return best, most + best.start if best else 0

    def _share(self, source: DraftSequence, target: DraftSequence, n: int) -> None:
        self._memory.copy(source.seq_id, target.seq_id, 0, n)
        target.tip = self._cells.share(source.tip, n - source.start)
        target.start, target.n_known = source.start, n

    def ensure_free(self, n: int) -> bool:
        """Whether `n` cells are free, after dropping draft sequences that are not being followed."""
        while self.n_free < n:
            idle = [draft for draft in self.all if draft.n_cells and draft.used_at < self._now]
            if not idle:
                return False
            self._keep(min(idle, key=lambda each: each.used_at), 0)
        return True

    def stop_following(self, draft: DraftSequence) -> None:
        """Stops following it for now: its cells may be given to others."""
        draft.used_at = self._now - 1

    def computed(self, draft: DraftSequence, n: int) -> None:
        """Adds new cells with the next `n` tokens of its sequence."""
        draft.n_known += n
        draft.tip = self._cells.grow(draft.tip, n)

    def guessed(self, draft: DraftSequence, token: int) -> None:
        """Adds a new cell with a drafted token."""
        draft.guessed.append(token)
        draft.tip = self._cells.grow(draft.tip, 1)

    def finished(self, sequence: Seq) -> None:
        """Called when the sequence has ended: its known tokens stay as a prefix for others, until the cells are
        needed."""
        if draft := self._of.get(sequence):
            self._keep(draft, draft.n_known if draft.may_share else 0)

    def clear(self) -> None:
        """Empties the memory."""
        self._memory.clear()
        self.forget()

    def _keep(self, draft: DraftSequence, n: int) -> None:
        """Detaches it from its sequence; it keeps its cells before token `n`."""
        if draft.sequence:
            del self._of[draft.sequence]
            draft.sequence = None
        self._cut(draft, n)

    def _cut(self, draft: DraftSequence, n: int) -> None:
        """Keeps only its cells before token `n`, which hold known tokens."""
        draft.guessed = []
        if n <= draft.start:
            n = 0
        n_kept = max(0, n - draft.start)
        if draft.tip and draft.tip.stop > n_kept:
            if not self._memory.remove(draft.seq_id, n):
                raise LlamaError(f"the memory for drafts cannot remove the tokens from {n} on")
            draft.tip = self._cells.cut(draft.tip, n_kept)
        draft.n_known, draft.start = n, draft.start if n else 0


class TargetCells:
    """Replaces `DraftCells` for a draft model without its own cells: it reads those of the model, which hold all tokens
    of a sequence except the last one."""

    n_free = 0
    """Cells of its own."""

    def __init__(self) -> None:
        self._of: dict[Seq, DraftSequence] = {}

    @property
    def all(self) -> list[DraftSequence]:
        """See `DraftCells.all`."""
        return list(self._of.values())

    def forget(self) -> None:
        """Nothing is kept."""
        self._of = {}

    clear = forget

    def get(self, sequence: Seq) -> DraftSequence | None:
        """See `DraftCells.get`."""
        return self._of.get(sequence)

    def follow(self, sequences: Iterable[Seq]) -> list[DraftSequence]:
        """The draft sequences of these, with the model's seq_ids, without the last token."""
        self._of = {sequence: DraftSequence(sequence.seq_id) for sequence in sequences}
        for sequence, draft in self._of.items():
            draft.sequence, draft.tokens, draft.n_known = sequence, sequence.tokens, sequence.n_tokens - 1
        return list(self._of.values())

    def ensure_free(self, n: int) -> bool:
        """None are needed."""
        return True

    def computed(self, draft: DraftSequence, n: int) -> None:
        """Computing the last token fills no cell: all tokens of a draft have the position after the last cell."""

    def guessed(self, draft: DraftSequence, token: int) -> None:
        """See `computed`."""

    def finished(self, sequence: Seq) -> None:
        """The sequence has ended."""
        self._of.pop(sequence, None)

    def share_more(self, draft: DraftSequence) -> None:
        """There is nothing to share."""

    def stop_following(self, draft: DraftSequence) -> None:
        """There is nothing to give to others."""


def _have_prefix(one: DraftSequence, other: DraftSequence, n: int) -> bool:
    """Whether the first `n` tokens of two sequences are equal, and their cells can be shared."""
    if not (one.may_share and other.may_share and one.salt == other.salt):
        return False
    assert one.sequence
    assert other.sequence
    n_least = min(one.sequence.n_tokens, other.sequence.n_tokens) - 1
    return n <= n_least and n - other.start > JOINED and n_common(one.tokens[:n], other.tokens[:n]) == n
