"""Drafts from the draft head in the model's own file (MTP), for all sequences of the batch together.

The head computes a draft token from the last token and the hidden row of the token before it, which the model has
computed. What the model computes meanwhile is kept on the host (`HiddenRows`), and read by the head when drafts are
asked for: so a head that is not worth its time costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.padding_rows import BatchEntry
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_cells import DraftCells, DraftSequence
from cppbatch.engine.speculation.draft_model import JOINED, DraftContext, DraftModel, DraftModelProposer
from cppbatch.engine.speculation.hidden_rows import HiddenRows, Rows
from cppbatch.llama import HeadBatch

MOST_BYTES = 256 << 20
"""Of all hidden rows that are kept on the host."""
_NEW = 0.1  # weight of a new time in what reading the tokens since the last draft takes
_LEAST_ROWS, _MOST_ROWS = 64, 4096  # of a sequence


class HeadRuntime(DraftContext, Protocol):
    """The context of a draft head (`cppbatch.llama.HeadContext`)."""

    def new_batch(self) -> HeadBatch: ...
    def hidden_rows(self, n: int) -> Rows: ...
    def close(self) -> None: ...


def most_rows(n_parallel: int, n_embd: int) -> int:
    """How many hidden rows of each sequence are kept at most."""
    return min(max(MOST_BYTES // (4 * n_parallel * n_embd), _LEAST_ROWS), _MOST_ROWS)


class HeadProposer(DraftModelProposer):
    """A `Proposer` that drafts with the draft head in the model's file.

    The engine says what it has computed (`computed`). A sequence's cells in the context of the head begin at the first
    token whose hidden row is known, unless another sequence has cells of the same prefix: behind a cached prefix, or a
    context shift, the head sees only what follows. Sequences with LoRA adapters, pictures or sounds get no drafts.
    """

    kind = "the draft head"

    def __init__(
        self,
        context: HeadRuntime,
        hidden_rows: Callable[[int], Rows],
        longest: int,
        eog: frozenset[int] = frozenset(),
        *,
        threads: ComputeThreads | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`hidden_rows`: `Context.hidden_rows` of the model. `longest`: tokens of a sequence at most. The others as in
        `DraftModelProposer`."""
        self._head = context
        self._hidden_rows = hidden_rows
        self._rows: dict[Seq, HiddenRows] = {}
        self._catch_up_s = 0.0
        self._places: dict[DraftSequence, int] = {}  # which row of the last decode is of which sequence
        super().__init__(DraftModel(context, longest), eog, threads=threads, clock=clock)
        self._n_embd = self._head_batch.hidden.shape[1]
        self._most_rows = most_rows(context.n_seq_max, self._n_embd)
        # A token without logits is computed by a decode of its own: some heads yield wrong hidden rows beside it.
        self._most_joined = 1

    def _new_cells(self) -> DraftCells:
        # Drafted tokens were computed from hidden rows of the head, not of the model.
        return DraftCells(self._context, first_of=self._first_of, keeps_guesses=False)

    def _new_batch(self) -> HeadBatch:
        self._head_batch = self._head.new_batch()
        return self._head_batch

    # --- what the model has computed ----------------------------------------------------------------------------------

    def computed(self, entries: Sequence[BatchEntry]) -> None:
        """The model's last decode had these entries, in order, whose accounting still is that before it."""
        if self._failed:
            return
        if len(self._rows) > self._context.n_seq_max:  # those of preempted sequences count beyond the memory plan
            self._rows = {sequence: known for sequence, known in self._rows.items() if sequence.seq_id >= 0}
        rows = self._hidden_rows(sum(n for _, n in entries))
        at = 0
        for entry, n in entries:
            if isinstance(entry, Seq) and (known := self._rows_of(entry)):
                known.put(entry.n_computed, rows[at : at + n], self._most_rows)
            at += n

    def _rows_of(self, sequence: Seq) -> HiddenRows | None:
        known = self._rows.get(sequence)
        if known is None and _may_draft(sequence):
            known = self._rows[sequence] = HiddenRows(self._n_embd)
        return known

    def _first_of(self, sequence: Seq) -> int:
        """The first token that the head can read: that behind the first known row. Before the first one of a text there
        is none, and zeros count as its row, as in llama.cpp."""
        start = self._rows[sequence].start
        return start + 1 if start else 0

    # --- the interface of proposers -----------------------------------------------------------------------------------

    def serves(self, sequence: Seq) -> bool:
        """As `ModelProposer.serves`: a sequence of which the row before its last token is known."""
        known, last = self._rows.get(sequence), sequence.n_tokens - 2
        return not self._failed and known is not None and known.start <= last < known.stop

    def seconds(self, n_sequences: int, k: int) -> float:
        """As `ModelProposer.seconds`, with what reading the tokens since the last draft takes."""
        return super().seconds(n_sequences, k) + self._catch_up_s

    def read_seconds(self, sequence: Seq) -> float:
        """As `ModelProposer.read_seconds`: rows that were forgotten are not read any more."""
        draft = self.cells.get(sequence)
        n = sequence.n_tokens - max(self._first_of(sequence), draft.n_known if draft else 0) - JOINED
        return n * self.cost.token_s(n) if n > 0 else 0.0

    def finished(self, sequence: Seq) -> None:
        """As `Proposer.finished`."""
        super().finished(sequence)
        self._rows.pop(sequence, None)

    def close_context(self) -> None:
        """Frees the context of the head."""
        self._head.close()

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _read(self, unread: list[DraftSequence]) -> None:
        # Others wait for a prefix that one of these reads.
        unread = [draft for draft in unread if draft.sequence and draft.n_known >= self._first_of(draft.sequence)]
        began = self._clock()
        is_usual = bool(unread) and all(draft.n_missing <= JOINED for draft in unread)
        super()._read(unread)
        if is_usual:
            self._catch_up_s += _NEW * (self._clock() - began - self._catch_up_s)

    def _add_known(self, draft: DraftSequence, n: int, *, n_logits: int) -> None:
        assert draft.sequence
        start, stop, known = draft.n_known, draft.n_known + n, self._rows[draft.sequence]
        hidden = known.rows(max(0, start - 1), stop - 1)
        if not start:
            hidden = np.concatenate([np.zeros((1, self._n_embd), np.float32), hidden])
        self._head_batch.add_hidden_run(draft.tokens[start:stop], hidden, start, draft.seq_id, n_logits=n_logits)
        known.forget(stop - 2)  # the last token may be computed again

    def _add_guessed(self, growing: list[DraftSequence], tokens: list[int]) -> None:
        places = [self._places[draft] for draft in growing]
        hidden = self._head.hidden_rows(max(places) + 1)[places]
        positions = [draft.position for draft in growing]
        self._head_batch.add_hidden_rows(tokens, hidden, positions, [draft.seq_id for draft in growing])

    def _decode(self, growing: list[DraftSequence]) -> None:
        super()._decode(growing)
        self._places = {draft: i for i, draft in enumerate(growing)}


def _may_draft(sequence: Seq) -> bool:
    """Whether the head may ever draft for it: its weights know no adapter, and its positions no picture."""
    is_text = sequence.request.task == "generate" and not sequence.media
    return is_text and not sequence.adapters and sequence.params.speculate and sequence.max_new > 1
