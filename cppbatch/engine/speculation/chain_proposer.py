"""Drafts from several draft heads (MTP) in the model's file, each of which was trained for one draft position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_cells import DraftSequence
from cppbatch.engine.speculation.draft_model import Guess
from cppbatch.engine.speculation.head_proposer import HeadProposer, HeadRuntime
from cppbatch.engine.speculation.row_proposer import Row, RowProposer, Rows


class _LaterHead(HeadProposer):
    """The head of a later draft position. For each sequence, its cells hold the known tokens, from the model's hidden
    rows, and those drafted before, from the hidden rows of the heads before it."""

    def __init__(
        self, first: ChainProposer, context: HeadRuntime, longest: int, eog: frozenset[int], **more: Any
    ) -> None:
        super().__init__(context, first._hidden_rows, longest, eog, **more)
        self._rows, self.cost = first._rows, first.cost

    _most_joined = RowProposer._most_joined

    def _forget(self, draft: DraftSequence, n: int) -> None:
        """The first head does."""

    def continue_drafts(
        self, growing: list[DraftSequence], drafted: list[list[int]], hidden: list[list[Row]]
    ) -> tuple[list[int], list[float]]:
        """The most likely token after the drafted ones of each, with its probability. `hidden`: the row before each."""
        batch = self._head_batch
        batch.clear()
        self._add_known([(draft, draft.n_missing) for draft in growing], n_logits=0)
        for draft, tokens, rows in zip(growing, drafted, hidden, strict=True):
            if before := tokens[:-1]:
                position, run = draft.position + draft.n_missing, np.array(before, np.int32)
                batch.add_hidden_run(run, np.stack(rows[:-1]), position, draft.seq_id, n_logits=0)
        self._context.decode(batch)
        for draft, tokens in zip(growing, drafted, strict=True):
            self.cells.computed(draft, draft.n_missing)
            for token in tokens[:-1]:
                self.cells.guessed(draft, token)
        self._given = np.stack([rows[-1] for rows in hidden])
        last = {draft: Guess(0, tokens, []) for draft, tokens in zip(growing, drafted, strict=True)}
        return self._compute_next(growing, last)

    def _add_guessed(self, growing: list[DraftSequence], tokens: list[int]) -> None:
        positions = [draft.position for draft in growing]
        self._head_batch.add_hidden_rows(tokens, self._given, positions, [draft.seq_id for draft in growing])


class ChainProposer(HeadProposer):
    """A `Proposer` that drafts with several heads of a file, each of which was trained for one draft position."""

    def __init__(
        self,
        contexts: Sequence[HeadRuntime],
        hidden_rows: Callable[[int], Rows],
        longest: int,
        eog: frozenset[int] = frozenset(),
        **more: Any,
    ) -> None:
        """`contexts`: of the heads, in order. The others are those of `HeadProposer`."""
        super().__init__(contexts[0], hidden_rows, longest, eog, **more)
        self._later = [_LaterHead(self, context, longest, eog, **more) for context in contexts[1:]]

    _most_joined = RowProposer._most_joined  # each head computes these tokens again

    @property
    def heads(self) -> list[HeadProposer]:
        """The heads, in the order of their draft positions."""
        return [self, *self._later]

    def seconds(self, n_sequences: int, k: int) -> float:
        """See `ModelProposer.seconds`. A later head also computes what was drafted before it."""
        again_s = (k - 1) * self.cost.rows_s((n_sequences,)) if self.cost.knows_rows else 0.0
        return super().seconds(n_sequences, k) + again_s

    def _get_ready(self, sequences: list[Seq], lengths: list[int]) -> dict[DraftSequence, int]:
        ready = super()._get_ready(sequences, [min(n, len(self.heads)) for n in lengths])
        for position, head in enumerate(self._later, 1):
            of_head = {draft.sequence for draft in head._get_ready(sequences, lengths)}
            ready = {draft: n if draft.sequence in of_head else min(n, position) for draft, n in ready.items()}
        for sequence in sequences:
            read = [draft.n_known for head in self.heads if (draft := head.cells.get(sequence))]
            self._rows[sequence].forget(min(read) - 2)
        return ready

    def _forget(self, draft: DraftSequence, n: int) -> None:
        """Once all heads have read the rows."""

    def _compute_guesses(self, length_of: dict[DraftSequence, int]) -> dict[DraftSequence, Guess]:
        self._hidden: dict[DraftSequence, list[Row]] = {draft: [] for draft in length_of}  # of each drafted token
        return super()._compute_guesses(length_of)

    def _compute_next(
        self, growing: list[DraftSequence], guesses: dict[DraftSequence, Guess]
    ) -> tuple[list[int], list[float]]:
        drafted = [guesses[draft].tokens for draft in growing]
        if drafted[0]:
            later = self._later[len(drafted[0]) - 1]
            of_head = [later.cells.get(draft.sequence) for draft in growing if draft.sequence]
            hidden = [self._hidden[draft] for draft in growing]
            found = later.continue_drafts([each for each in of_head if each], drafted, hidden)
        else:
            found = super()._compute_next(growing, guesses)
        computed = self.heads[len(drafted[0])]._head
        for draft, row in zip(growing, computed.hidden_rows(len(growing)), strict=True):
            self._hidden[draft].append(row.copy())
        return found

    def _clear_cells(self) -> None:
        for head in self.heads:
            head.cells.clear()

    def finished(self, sequence: Seq) -> None:
        """See `Proposer.finished`."""
        super().finished(sequence)
        for head in self._later:
            head.cells.finished(sequence)

    def close_context(self) -> None:
        """See `RowProposer.close_context`."""
        super().close_context()
        for head in self._later:
            head.close_context()

    def open_again(self) -> None:
        """See `RowProposer.open_again`."""
        super().open_again()
        for head in self._later:
            head.open_again()
            self._failed |= head._failed
