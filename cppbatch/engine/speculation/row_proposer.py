"""Proposers that draft from hidden rows of the model: what a draft head in its file (MTP) and draft models made for it
(EAGLE-3, DFlash, Gemma 4's assistant) have in common.

The model's hidden rows are kept on the host (`HiddenRows`), and read when drafts are requested, so a proposer that is
not worth its time costs next to nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.kv.batch_order import BatchEntry, PromptPart
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_cells import JOINED, DraftCells, DraftSequence, TargetCells
from cppbatch.engine.speculation.draft_model import DraftContext, DraftModel, DraftModelProposer
from cppbatch.errors import LlamaError

log = logging.getLogger("cppbatch.engine")

Rows = npt.NDArray[np.float32]
"""float32[n, n_embd]"""
Row = npt.NDArray[np.float32]
"""float32[n_embd]"""

MOST_BYTES = 256 << 20
"""The size of all hidden rows that are kept on the host."""
_LEAST_ROWS, _MOST_ROWS = 64, 4096  # of a sequence


class RowRuntime(DraftContext, Protocol):
    """A context that reads hidden rows of the model."""

    @property
    def n_row(self) -> int:
        """Numbers of a row."""
        ...

    def close(self) -> None: ...
    def open_again(self) -> None: ...


class RowProposer(DraftModelProposer, ABC):
    """A `Proposer` that drafts from hidden rows of the model.

    The engine says what it has computed (`computed`). A sequence's cells in the context for drafts begin at the first
    token whose row is known, unless another sequence has cells of the same prefix: after a cached prefix, or a context
    shift, the drafts depend only on what follows. Sequences with LoRA adapters, control vectors, images
    or audio get no drafts.
    """

    def __init__(
        self,
        context: RowRuntime,
        hidden_rows: Callable[[int], Rows],
        longest: int,
        eog: frozenset[int] = frozenset(),
        *,
        threads: ComputeThreads | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`hidden_rows`: `Context.hidden_rows` of the model. `longest`: tokens of a sequence at most. The others as in
        `DraftModelProposer`."""
        self._row_context = context
        self._hidden_rows = hidden_rows
        self._rows: dict[Seq, HiddenRows] = {}
        self._catch_up_s = 0.0
        super().__init__(DraftModel(context, longest), eog, threads=threads, clock=clock)
        self._n_row = context.n_row
        self._most_rows = most_rows(context.n_seq_max, self._n_row)

    def _new_cells(self) -> DraftCells | TargetCells:
        # Drafted tokens were computed from other rows than those of the model.
        return DraftCells(self._context, first_computable=self._first_computable, keeps_guesses=False)

    # --- what the model has computed ----------------------------------------------------------------------------------

    def computed(self, entries: Sequence[BatchEntry]) -> None:
        """Records the entries of the model's last decode, in order, whose accounting has not been updated yet."""
        if self._failed:
            return
        if len(self._rows) > self._context.n_seq_max:  # those of preempted sequences count beyond the memory plan
            for preempted in [each for each in self._rows if each.seq_id < 0]:
                del self._rows[preempted]
        rows = self._hidden_rows(sum(n for _, n in entries))
        at = 0
        for entry, n in entries:
            sequence = entry if isinstance(entry, Seq) else entry.sequence if isinstance(entry, PromptPart) else None
            if sequence and (known := self._rows_of(sequence)):
                known.put(entry.n_computed, rows[at : at + n], self._most_rows)
            at += n

    def _rows_of(self, sequence: Seq) -> HiddenRows | None:
        known = self._rows.get(sequence)
        if known is None and _may_draft(sequence):
            known = self._rows[sequence] = HiddenRows(self._n_row)
        return known

    @abstractmethod
    def _first_computable(self, sequence: Seq) -> int:
        """The first token whose cell can be computed from the known rows."""

    # --- the interface of proposers -----------------------------------------------------------------------------------

    def serves(self, sequence: Seq) -> bool:
        """Whether it drafts for this sequence: the row before its last token must be known."""
        known, last = self._rows.get(sequence), sequence.n_tokens - 2
        return not self._failed and known is not None and known.start <= last < known.stop

    def seconds(self, n_sequences: int, k: int) -> float:
        """See `ModelProposer.seconds`. Reading the tokens since the last draft is included."""
        return super().seconds(n_sequences, k) + self._catch_up_s

    def read_seconds(self, sequence: Seq) -> float:
        """See `ModelProposer.read_seconds`. Tokens whose rows were forgotten are not read any more."""
        draft, first = self.cells.get(sequence), self._first_computable(sequence)
        return self._read_s(sequence.n_tokens - max(first, draft.n_known if draft else 0) - JOINED)

    def finished(self, sequence: Seq) -> None:
        """See `Proposer.finished`."""
        super().finished(sequence)
        self._rows.pop(sequence, None)

    def close_context(self) -> None:
        """Frees the context for drafts."""
        self._row_context.close()

    def open_again(self) -> None:
        """Recreates the empty draft context after `close_context`, because the model's own was recreated. If that
        fails, it is logged, and there are no more drafts."""
        self.cells.forget()
        try:
            self._row_context.open_again()
        except LlamaError as error:
            self._failed = True
            log.error("stopped drafting with %s, which lost its context: %s", self.kind, error)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _most_joined(self, drafts: list[DraftSequence]) -> int:
        return 1

    def _read(self, unread: list[DraftSequence]) -> None:
        # Others wait for a prefix that one of these reads.
        first = self._first_computable
        unread = [draft for draft in unread if draft.sequence and draft.n_known >= first(draft.sequence)]
        began = self._clock()
        is_usual = bool(unread) and all(draft.n_missing <= JOINED for draft in unread)
        super()._read(unread)
        if is_usual:
            self._caught_up(self._clock() - began)

    def _caught_up(self, seconds: float) -> None:
        """Reading the tokens since the last draft took this long, in addition to the draft tokens."""
        usual = self._catch_up_s or seconds
        self._catch_up_s = usual + 0.1 * (seconds - usual)  # a mean of about ten times


def _may_draft(sequence: Seq) -> bool:
    """Whether there may ever be drafts for it: their weights know no adapter, and their positions no image."""
    is_text = sequence.request.task == "generate" and not sequence.media
    return is_text and not sequence.adapters and sequence.params.speculate and sequence.max_new > 1


def most_rows(n_parallel: int, n_row: int) -> int:
    """How many hidden rows of each sequence are kept at most, of `n_row` numbers each."""
    return min(max(MOST_BYTES // (4 * n_parallel * n_row), _LEAST_ROWS), _MOST_ROWS)


class HiddenRows:
    """The rows of the tokens from `start` up to `stop` of a sequence, the latest ones."""

    __slots__ = ("_rows", "start", "stop")

    def __init__(self, n_embd: int) -> None:
        self._rows: Rows = np.empty((16, n_embd), np.float32)
        self.start = self.stop = 0

    def put(self, start: int, rows: Rows, most: int) -> None:
        """Adds the rows of the tokens from `start` on, which replace what was known of these. After a gap only they are
        left; of more than `most` rows, the older half is forgotten."""
        stop = start + len(rows)
        if len(rows) > most:
            rows, start = rows[-most:], stop - most
        if not self.start <= start <= self.stop:
            self.start = self.stop = start
        elif stop - self.start > most:
            self.forget(stop - max(len(rows), most // 2))
        at, n = start - self.start, stop - self.start
        if n > len(self._rows):
            larger = np.empty((min(most, max(n, 2 * len(self._rows))), self._rows.shape[1]), np.float32)
            larger[:at] = self._rows[:at]
            self._rows = larger
        self._rows[at:n] = rows
        self.stop = stop

    def rows(self, start: int, stop: int) -> Rows:
        """Returns a view of the rows of the tokens from `start` up to `stop`, all of them known."""
        assert self.start <= start <= stop <= self.stop, f"rows {start} to {stop} of {self.start} to {self.stop}"
        return self._rows[start - self.start : stop - self.start]

    def forget(self, start: int) -> None:
        """Rows before `start` are not needed any more."""
        if start <= self.start:
            return
        start = min(start, self.stop)
        n = self.stop - start
        if n:
            self._rows[:n] = self._rows[start - self.start : start - self.start + n].copy()
        self.start = start
