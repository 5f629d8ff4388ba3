"""What the cells of the draft model's context hold: one draft sequence for each seq_id.

The cells follow the sequences lazily: a draft sequence is compared with its sequence when that is drafted for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.cells import Cells, Span
from cppbatch.engine.radix_tree import n_common
from cppbatch.engine.sequence import Seq
from cppbatch.errors import LlamaError

Tokens = npt.NDArray[np.int32]

_WORTH_SHARING = 8  # tokens: computing fewer costs no more than a step that is computed anyway


class DraftMemory(Protocol):
    """The cells of the draft model's context, in the unified layout (`cppbatch.llama.Context`)."""

    n_ctx: int
    n_seq_max: int

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool: ...
    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None: ...
    def clear(self) -> None: ...


class DraftSequence:
    """A seq_id of the draft context. Its cells hold `tokens[:n_known]`, then `guessed`."""

    __slots__ = ("guessed", "may_share", "n_known", "salt", "seq_id", "sequence", "tip", "tokens", "used_at")

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.sequence: Seq | None = None  # None: it has ended, and its cells are kept as a prefix for others
        self.tokens: Tokens = np.empty(0, np.int32)  # the sequence's own array, which only grows
        self.n_known = 0
        self.guessed: list[int] = []
        self.salt = ""
        self.may_share = False
        self.tip: Span | None = None
        self.used_at = 0

    @property
    def n_cells(self) -> int:
        """Cells that it holds, shared ones included."""
        return self.n_known + len(self.guessed)

    @property
    def n_missing(self) -> int:
        """Tokens of its sequence to compute until a draft begins: one if it is up to date."""
        assert self.sequence
        return self.sequence.n_tokens - self.n_known


class DraftCells:
    """Gives each sequence a seq_id of the draft context, and counts the cells.

    A sequence that was not seen before begins with the longest prefix that other draft sequences hold. When seq_ids or
    cells run out, the least recently used draft sequences lose theirs: those of ended, preempted and swapped sequences.
    """

    def __init__(self, memory: DraftMemory) -> None:
        self._memory = memory
        self._reset()

    def _reset(self) -> None:
        self._cells = Cells()
        self.all = [DraftSequence(seq_id) for seq_id in range(self._memory.n_seq_max)]
        self._of: dict[Seq, DraftSequence] = {}
        self._now = 0  # counts the calls of `follow`

    @property
    def n_free(self) -> int:
        """Cells that no draft sequence holds."""
        return self._memory.n_ctx - self._cells.n_used

    def get(self, sequence: Seq) -> DraftSequence | None:
        """The draft sequence of a sequence, if it has one."""
        return self._of.get(sequence)

    def follow(self, sequences: Iterable[Seq]) -> list[DraftSequence]:
        """The draft sequences of these, at most one for each seq_id. Their cells hold only known tokens, and not the
        last one."""
        sequences = list(sequences)
        self._now += 1
        for sequence in sequences:
            if known := self._of.get(sequence):
                known.used_at = self._now
                self._drop_wrong_guesses(known, sequence)
        return [self._of.get(sequence) or self._claim(sequence) for sequence in sequences]

    def _drop_wrong_guesses(self, draft: DraftSequence, sequence: Seq) -> None:
        right = n_common(np.asarray(draft.guessed, np.int32), sequence.tokens[draft.n_known : sequence.n_tokens])
        self._cut(draft, min(draft.n_known + right, sequence.n_tokens - 1))

    def _claim(self, sequence: Seq) -> DraftSequence:
        idle = [draft for draft in self.all if draft.used_at < self._now]
        draft = min(idle, key=lambda each: (each.n_cells > 0, each.used_at))
        source, n = self._longest_prefix(sequence, 0)
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
        """Lets it hold the cells of a longer prefix, if another one has computed one since."""
        assert draft.sequence
        source, n = self._longest_prefix(draft.sequence, draft.n_known)
        if source:
            self._cut(draft, 0)
            self._share(source, draft, n)

    def _longest_prefix(self, sequence: Seq, n_have: int) -> tuple[DraftSequence | None, int]:
        """The draft sequence with the most of these tokens, and how many; None if that gains too little."""
        request = sequence.request
        best, most = None, n_have + _WORTH_SHARING
        if not request.cache_prompt:
            return None, 0
        known = sequence.tokens[: sequence.n_tokens - 1]
        for draft in self.all:
            if draft.n_known > most and draft.may_share and draft.salt == request.cache_salt:
                n = n_common(draft.tokens[: draft.n_known], known)
                if n > most:
                    best, most = draft, n
        return best, most

    def _share(self, source: DraftSequence, target: DraftSequence, n: int) -> None:
        self._memory.copy(source.seq_id, target.seq_id, 0, n)
        target.tip, target.n_known = self._cells.share(source.tip, n), n

    def ensure_free(self, n: int) -> bool:
        """Whether `n` cells are free, after dropping draft sequences that are not among the followed ones."""
        while self.n_free < n:
            idle = [draft for draft in self.all if draft.n_cells and draft.used_at < self._now]
            if not idle:
                return False
            self._keep(min(idle, key=lambda each: each.used_at), 0)
        return True

    def stop_following(self, draft: DraftSequence) -> None:
        """It is not drafted for now: its cells may be given to those that are followed."""
        draft.used_at = self._now - 1

    def computed(self, draft: DraftSequence, n: int) -> None:
        """The next `n` tokens of its sequence are in new cells."""
        draft.n_known += n
        draft.tip = self._cells.grow(draft.tip, n)

    def guessed(self, draft: DraftSequence, token: int) -> None:
        """A drafted token is in a new cell."""
        draft.guessed.append(token)
        draft.tip = self._cells.grow(draft.tip, 1)

    def finished(self, sequence: Seq) -> None:
        """The sequence has ended: its known tokens stay as a prefix for others, until the cells are needed."""
        if draft := self._of.get(sequence):
            self._keep(draft, draft.n_known if draft.may_share else 0)

    def clear(self) -> None:
        """Empties the memory."""
        self._memory.clear()
        self._reset()

    def _keep(self, draft: DraftSequence, n: int) -> None:
        """It has no sequence any more, and keeps its first `n` cells."""
        if draft.sequence:
            del self._of[draft.sequence]
            draft.sequence = None
        self._cut(draft, n)

    def _cut(self, draft: DraftSequence, n: int) -> None:
        """Only its first `n` cells remain, which hold known tokens."""
        draft.guessed = []
        if draft.tip and draft.tip.stop > n:
            if not self._memory.remove(draft.seq_id, n):
                raise LlamaError(f"the draft model's memory cannot remove the tokens from {n} on")
            draft.tip = self._cells.cut(draft.tip, n)
        draft.n_known = n
