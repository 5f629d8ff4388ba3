"""Drafts from one layer that reads a token and the hidden row of the token before it, for all sequences of the batch
together: the draft head in the model's own file (MTP), an EAGLE-3 draft model, or Gemma 4's assistant.

Each decode computes one draft token of each sequence; beside the next one it reads the layer's own hidden row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_cells import JOINED, DraftSequence, TargetCells
from cppbatch.engine.speculation.draft_model import Guess
from cppbatch.engine.speculation.row_proposer import RowProposer, RowRuntime, Rows
from cppbatch.errors import CacheFull
from cppbatch.llama import HeadBatch


class HeadRuntime(RowRuntime, Protocol):
    """The context of a draft head or an EAGLE-3 draft model (`cppbatch.llama.HeadContext`, `EagleContext`)."""

    reads_first: bool

    @property
    def n_logits(self) -> int:
        """Rows of logits that a decode may have."""
        ...

    def new_batch(self) -> HeadBatch: ...
    def encode(self, rows: Rows) -> Rows: ...
    def hidden_rows(self, n: int) -> Rows: ...


class HeadProposer(RowProposer):
    """A `Proposer` that drafts with the draft head in the model's file, or an EAGLE-3 draft model."""

    def __init__(
        self,
        context: HeadRuntime,
        hidden_rows: Callable[[int], Rows],
        longest: int,
        eog: frozenset[int] = frozenset(),
        *,
        kind: str = "the draft head",
        threads: ComputeThreads | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`kind`: for messages. The others are those of `RowProposer`."""
        self.kind = kind
        self._head = context
        self._n_catch_ups = 0
        self._places: dict[DraftSequence, int] = {}  # the row of each sequence's last token in the last decode
        super().__init__(context, hidden_rows, longest, eog, threads=threads, clock=clock)

    def _new_batch(self) -> HeadBatch:
        self._head_batch = self._head.new_batch()
        return self._head_batch

    def _first_computable(self, sequence: Seq) -> int:
        """The first cell is that of the token after the first known row. Before the first token of a text there is no
        row: a draft head gets zeros instead, as in llama.cpp, and EAGLE-3 does not read that token."""
        start = self._rows[sequence].start
        return start + 1 if start or not self._head.reads_first else 0

    def _most_joined(self, drafts: list[DraftSequence]) -> int:
        """Beside a token without logits some heads yield wrong hidden rows. So the tokens since the last draft have
        logits too, or a decode of their own, if that takes less time (see `DraftModelProposer._most_joined`)."""
        missing = [draft.n_missing for draft in drafts if draft.n_missing <= JOINED]
        n, n_apart = sum(missing), sum(missing) - len(missing)
        if not n_apart or sum(min(draft.n_missing, JOINED) for draft in drafts) > self._head.n_logits:
            return 1
        if not self.cost.knows_about((n,)):
            return JOINED
        more_s = self.cost.rows_s((n,)) - self.cost.rows_s((len(missing),))
        self._n_catch_ups += 1
        if self.cost.knows_prompts and more_s >= n_apart * self.cost.token_s(n_apart):
            return 1
        # in one of 64 drafts, the tokens since the last one have a decode of their own, to update its time
        if self._n_catch_ups % 64 == 0:
            return 1
        self._caught_up(more_s)
        return JOINED

    def _add_known(self, pieces: Sequence[tuple[DraftSequence, int]], *, n_logits: int) -> None:
        rows = self._head.encode(np.concatenate([self._rows_before(draft, n) for draft, n in pieces]))
        at = 0
        for draft, n in pieces:
            start, stop = draft.n_known, draft.n_known + n
            of_piece, at = rows[at : at + n], at + n
            n_of_piece = n if n_logits else 0
            self._head_batch.add_hidden_run(
                draft.tokens[start:stop], of_piece, start, draft.seq_id, n_logits=n_of_piece
            )
            self._forget(draft, stop)

    def _forget(self, draft: DraftSequence, n: int) -> None:
        """The first `n` tokens of its sequence are read; the last one may be computed again."""
        assert draft.sequence
        self._rows[draft.sequence].forget(n - 2)

    def _rows_before(self, draft: DraftSequence, n: int) -> Rows:
        """The row before each of the next `n` tokens that its cells lack."""
        assert draft.sequence
        start, stop = draft.n_known, draft.n_known + n
        rows = self._rows[draft.sequence].rows(max(0, start - 1), stop - 1)
        return rows if start else np.concatenate([np.zeros((1, self._n_row), np.float32), rows])

    def _add_guessed(self, growing: list[DraftSequence], tokens: list[int]) -> None:
        places = [self._places[draft] for draft in growing]
        hidden = self._head.hidden_rows(max(places) + 1)[places]
        positions = [draft.position for draft in growing]
        self._head_batch.add_hidden_rows(tokens, hidden, positions, [draft.seq_id for draft in growing])

    def _decode(self, growing: list[DraftSequence]) -> None:
        super()._decode(growing)
        ends = np.cumsum([max(1, draft.n_missing) for draft in growing])
        self._places = dict(zip(growing, (ends - 1).tolist(), strict=True))

    def _logits(self, growing: list[DraftSequence]) -> npt.NDArray[np.float32]:
        n = self._batch.n_outputs
        rows = self._context.logits(n)
        return rows if n == len(growing) else rows[[self._places[draft] for draft in growing]]


class AssistantProposer(HeadProposer):
    """A `Proposer` that drafts with Gemma 4's assistant, which reads the model's own cells, and so no prompts."""

    def _new_cells(self) -> TargetCells:
        return TargetCells()

    def read_seconds(self, sequence: Seq) -> float:
        """It reads no prompts."""
        return 0.0

    def _guess(self, sequences: list[Seq], lengths: list[int]) -> list[Guess | None]:
        try:
            return super()._guess(sequences, lengths)
        except CacheFull:  # llama.cpp looks for free cells of the model for tokens that fill none
            return [None] * len(sequences)
