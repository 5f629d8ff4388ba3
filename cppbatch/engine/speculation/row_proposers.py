"""Proposers that draft from hidden rows of the model: a draft head in its file (MTP), and draft models made for it
(EAGLE-3, DFlash, Gemma 4's assistant).

The model's hidden rows are kept on the host (`HiddenRows`), and read when drafts are requested, so a proposer that is
not worth its time costs next to nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.kv.padding_rows import BatchEntry
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_cells import DraftCells, DraftSequence, TargetCells
from cppbatch.engine.speculation.draft_model import JOINED, DraftContext, DraftModel, DraftModelProposer, Guess
from cppbatch.errors import CacheFull, LlamaError
from cppbatch.llama import HeadBatch, RowBatch

log = logging.getLogger("cppbatch.engine")

MOST_BYTES = 256 << 20
"""Of all hidden rows that are kept on the host."""
_NEW = 0.1  # weight of a new time in what reading the tokens since the last draft takes
_LEAST_ROWS, _MOST_ROWS = 64, 4096  # of a sequence


class RowRuntime(DraftContext, Protocol):
    """A context that reads hidden rows of the model."""

    @property
    def n_row(self) -> int:
        """Numbers of a row."""
        ...

    def close(self) -> None: ...
    def open_again(self) -> None: ...


def most_rows(n_parallel: int, n_row: int) -> int:
    """How many hidden rows of each sequence are kept at most, of `n_row` numbers each."""
    return min(max(MOST_BYTES // (4 * n_parallel * n_row), _LEAST_ROWS), _MOST_ROWS)


class RowProposer(DraftModelProposer, ABC):
    """A `Proposer` that drafts from hidden rows of the model.

    The engine says what it has computed (`computed`). A sequence's cells in the context for drafts begin at the first
    token whose row is known, unless another sequence has cells of the same prefix: after a cached prefix, or a context
    shift, the drafts depend only on what follows. Sequences with LoRA adapters, images or audio get no drafts.
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
        # A token without logits is computed by a decode of its own: some heads yield wrong hidden rows beside it.
        self._most_joined = 1

    def _new_cells(self) -> DraftCells | TargetCells:
        # Drafted tokens were computed from other rows than those of the model.
        return DraftCells(self._context, first_of=self._first_of, keeps_guesses=False)

    # --- what the model has computed ----------------------------------------------------------------------------------

    def computed(self, entries: Sequence[BatchEntry]) -> None:
        """Records the entries of the model's last decode, in order, whose accounting has not been updated yet."""
        if self._failed:
            return
        if len(self._rows) > self._context.n_seq_max:  # those of preempted sequences count beyond the memory plan
            for sequence in [each for each in self._rows if each.seq_id < 0]:
                del self._rows[sequence]
        rows = self._hidden_rows(sum(n for _, n in entries))
        at = 0
        for entry, n in entries:
            if isinstance(entry, Seq) and (known := self._rows_of(entry)):
                known.put(entry.n_computed, rows[at : at + n], self._most_rows)
            at += n

    def _rows_of(self, sequence: Seq) -> HiddenRows | None:
        known = self._rows.get(sequence)
        if known is None and _may_draft(sequence):
            known = self._rows[sequence] = HiddenRows(self._n_row)
        return known

    @abstractmethod
    def _first_of(self, sequence: Seq) -> int:
        """The first token whose cell can be computed from the known rows."""

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

    def _read(self, unread: list[DraftSequence]) -> None:
        # Others wait for a prefix that one of these reads.
        unread = [draft for draft in unread if draft.sequence and draft.n_known >= self._first_of(draft.sequence)]
        began = self._clock()
        is_usual = bool(unread) and all(draft.n_missing <= JOINED for draft in unread)
        super()._read(unread)
        if is_usual:
            self._catch_up_s += _NEW * (self._clock() - began - self._catch_up_s)


def _may_draft(sequence: Seq) -> bool:
    """Whether there may ever be drafts for it: their weights know no adapter, and their positions no image."""
    is_text = sequence.request.task == "generate" and not sequence.media
    return is_text and not sequence.adapters and sequence.params.speculate and sequence.max_new > 1


# --- hidden rows -----------------------------------------------------------------------------------------------------
# The hidden rows of a sequence that its draft head has not read yet.


Rows = npt.NDArray[np.float32]
"""float32[n, n_embd]"""

_FIRST = 16  # rows: of a sequence that decodes


class HiddenRows:
    """The rows of the tokens from `start` up to `stop` of a sequence, the latest ones."""

    __slots__ = ("_rows", "start", "stop")

    def __init__(self, n_embd: int) -> None:
        self._rows: Rows = np.empty((_FIRST, n_embd), np.float32)
        self.start = self.stop = 0

    def put(self, start: int, rows: Rows, most: int) -> None:
        """Those of the tokens from `start` on were computed, which replace what was known of these. Behind a gap only
        they are left; of more than `most` rows, the older half is forgotten."""
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
        """A view of those of the tokens from `start` up to `stop`, all of them known."""
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


# --- head proposer ---------------------------------------------------------------------------------------------------
# Drafts from one layer that reads a token and the hidden row of the token before it, for all sequences of the batch
# together: the draft head in the model's own file (MTP), or an EAGLE-3 draft model.
#
# Each decode computes one draft token of each sequence; beside the next one it reads the layer's own hidden row.


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


# --- dflash proposer -------------------------------------------------------------------------------------------------
# Drafts from a DFlash draft model, for all sequences of the batch together.
#
# Its cells are made of hidden rows of the model, without tokens. One decode of a block for each sequence, its newest
# token and masks, drafts all tokens at once; then the block is removed.


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
        """As `RowProposer`."""
        self._dflash = context
        super().__init__(context, hidden_rows, longest, eog, threads=threads, clock=clock)

    def _new_batch(self) -> RowBatch:
        self._row_batch = self._dflash.new_rows()
        return self._row_batch

    def _first_of(self, sequence: Seq) -> int:
        return self._rows[sequence].start

    def serves(self, sequence: Seq) -> bool:
        """As `RowProposer.serves`, if a block fits after the text."""
        return sequence.n_tokens - 1 + self._dflash.block <= self._longest and super().serves(sequence)

    def seconds(self, n_sequences: int, k: int) -> float:
        """As `RowProposer.seconds`: a block takes as long for one token as for all."""
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
