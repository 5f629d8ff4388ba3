"""Drafts from a DFlash draft model, for all sequences of the batch together.

Its cells are made of hidden rows of the model, without tokens. One decode of a block for each sequence, its newest
token and masks, drafts all tokens at once; then the block is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_cells import DraftSequence
from cppbatch.engine.speculation.draft_model import Guess
from cppbatch.engine.speculation.row_proposer import RowProposer, RowRuntime, Rows
from cppbatch.llama import RowBatch


class DFlashRuntime(RowRuntime, Protocol):
    """The context of a DFlash draft model (`cppbatch.llama.DFlashContext`)."""

    block: int

    def new_rows(self) -> RowBatch: ...
    def draft(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]: ...


class DFlashProposer(RowProposer):
    """A `Proposer` that drafts with a DFlash draft model. All blocks have the same length, so what is drafted for a
    sequence does not depend on the others."""

    kind = "the draft model"

    def __init__(
        self,
        context: DFlashRuntime,
        hidden_rows: Callable[[int], Rows],
        longest: int,
        eog: frozenset[int] = frozenset(),
        *,
        threads: ComputeThreads | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """See `RowProposer`."""
        self._dflash = context
        super().__init__(context, hidden_rows, longest, eog, threads=threads, clock=clock)

    def _new_batch(self) -> RowBatch:
        self._row_batch = self._dflash.new_rows()
        return self._row_batch

    def _first_computable(self, sequence: Seq) -> int:
        return self._rows[sequence].start

    def serves(self, sequence: Seq) -> bool:
        """Whether it drafts for this sequence: a block must also fit after the text (see `RowProposer.serves`)."""
        return sequence.n_tokens - 1 + self._dflash.block <= self._longest and super().serves(sequence)

    def seconds(self, n_sequences: int, k: int) -> float:
        """See `RowProposer.seconds`. A block takes as long for one token as for all."""
        rows = (n_sequences * self._dflash.block,)
        return self.cost.rows_s(rows) + self._catch_up_s if self.cost.knows_rows else 0.0

    def _n_drafted_cells(self, length: int) -> int:
        return self._dflash.block - 1

    def _add_known(self, pieces: Sequence[tuple[DraftSequence, int]], *, n_logits: int) -> None:
        runs: list[tuple[Rows, int, int]] = []
        for draft, n in pieces:
            assert draft.sequence
            rows = self._rows[draft.sequence].rows(draft.n_known, draft.n_known + n)
            runs.append((rows, draft.n_known, draft.seq_id))
        self._row_batch.add_runs(runs)
        for draft, n in pieces:
            assert draft.sequence
            self._rows[draft.sequence].forget(draft.n_known + n - 1)  # `serves` looks for the last one

    def _compute_guesses(self, length_of: dict[DraftSequence, int]) -> dict[DraftSequence, Guess]:
        growing, guesses = sorted(length_of, key=lambda draft: draft.seq_id), {}
        at_once = self._context.n_batch // self._dflash.block
        for i in range(0, len(growing), at_once):
            group, began = growing[i : i + at_once], self._clock()
            newest = [int(draft.tokens[draft.n_known]) for draft in group]
            tokens, probabilities = self._dflash.draft(
                newest, [draft.n_known for draft in group], [draft.seq_id for draft in group]
            )
            self.cost.observe_rows((len(group) * self._dflash.block,), self._clock() - began)
            for draft, found, its in zip(group, tokens.tolist(), probabilities.tolist(), strict=True):
                n = next((i + 1 for i, token in enumerate(found) if token in self._eog), len(found))
                n = min(n, length_of[draft])
                guesses[draft] = Guess(draft.n_known + 1, found[:n], its[:n])
        return guesses
