"""Drafts from one layer that reads a token and the hidden row of the token before it, for all sequences of the batch
together: the draft head in the model's own file (MTP), or an EAGLE-3 draft model.

Each decode computes one draft token of each sequence; beside the next one it reads the layer's own hidden row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_cells import DraftSequence, TargetCells
from cppbatch.engine.speculation.draft_model import Guess
from cppbatch.engine.speculation.hidden_rows import Rows
from cppbatch.engine.speculation.row_proposer import RowProposer, RowRuntime
from cppbatch.errors import CacheFull
from cppbatch.llama import HeadBatch

Row = npt.NDArray[np.float32]
"""float32[n_embd]"""


class HeadRuntime(RowRuntime, Protocol):
    """The context of a draft head or an EAGLE-3 draft model (`cppbatch.llama.HeadContext`, `EagleContext`)."""

    reads_first: bool

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
        """`kind`: for messages. The others as in `RowProposer`."""
        self.kind = kind
        self._head = context
        self._places: dict[DraftSequence, int] = {}  # which row of the last decode is of which sequence
        super().__init__(context, hidden_rows, longest, eog, threads=threads, clock=clock)

    def _new_batch(self) -> HeadBatch:
        self._head_batch = self._head.new_batch()
        return self._head_batch

    def _first_of(self, sequence: Seq) -> int:
        """As `RowProposer._first_of`: the token after the first known row. Before the first token of a text there is no
        row; for a draft head zeros count as it, as in llama.cpp, and EAGLE-3 does not read that token."""
        start = self._rows[sequence].start
        return start + 1 if start or not self._head.reads_first else 0

    def _add_known(self, pieces: Sequence[tuple[DraftSequence, int]], *, n_logits: int) -> None:
        rows = self._head.encode(np.concatenate([self._rows_before(draft, n) for draft, n in pieces]))
        at = 0
        for draft, n in pieces:
            start, stop = draft.n_known, draft.n_known + n
            of_piece, at = rows[at : at + n], at + n
            self._head_batch.add_hidden_run(draft.tokens[start:stop], of_piece, start, draft.seq_id, n_logits=n_logits)
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
        self._places = {draft: i for i, draft in enumerate(growing)}


class _LaterHead(HeadProposer):
    """The head of a later draft position. Of each sequence its cells hold the known tokens, from the model's hidden
    rows, and those drafted before, from the hidden rows of the heads before it."""

    def __init__(
        self, first: ChainProposer, context: HeadRuntime, longest: int, eog: frozenset[int], **more: Any
    ) -> None:
        super().__init__(context, first._hidden_rows, longest, eog, **more)
        self._rows, self.cost = first._rows, first.cost

    def _forget(self, draft: DraftSequence, n: int) -> None:
        """The first head does."""

    def continue_drafts(
        self, growing: list[DraftSequence], drafted: list[list[int]], hidden: list[list[Row]]
    ) -> tuple[list[int], list[float]]:
        """The likeliest token after the drafted ones of each, with its probability. `hidden`: the row before each."""
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
        """`contexts`: of the heads, in order. The others as in `HeadProposer`."""
        super().__init__(contexts[0], hidden_rows, longest, eog, **more)
        self._later = [_LaterHead(self, context, longest, eog, **more) for context in contexts[1:]]

    @property
    def heads(self) -> list[HeadProposer]:
        """The heads, in the order of their draft positions."""
        return [self, *self._later]

    def seconds(self, n_sequences: int, k: int) -> float:
        """As `ModelProposer.seconds`: a later head computes what was drafted before it too."""
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
        """As `Proposer.finished`."""
        super().finished(sequence)
        for head in self._later:
            head.cells.finished(sequence)

    def close_context(self) -> None:
        """As `RowProposer.close_context`."""
        super().close_context()
        for head in self._later:
            head.close_context()

    def open_again(self) -> None:
        """As `RowProposer.open_again`."""
        super().open_again()
        for head in self._later:
            head.open_again()
            self._failed |= head._failed


class AssistantProposer(HeadProposer):
    """A `Proposer` that drafts with Gemma 4's assistant, which reads the model's own cells, and so no prompts."""

    def _new_cells(self) -> TargetCells:
        return TargetCells()

    def read_seconds(self, sequence: Seq) -> float:
        """As `ModelProposer.read_seconds`."""
        return 0.0

    def _guess(self, sequences: list[Seq], lengths: list[int]) -> list[Guess | None]:
        try:
            return super()._guess(sequences, lengths)
        except CacheFull:  # llama.cpp looks for free cells of the model for tokens that fill none
            return [None] * len(sequences)
