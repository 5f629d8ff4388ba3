"""Draft heads, an EAGLE-3 and a DFlash draft model of the fake model: they see the text only by the hidden rows, and
refuse wrong ones."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cppbatch.engine.speculation.chain_proposer import ChainProposer
from cppbatch.engine.speculation.dflash_proposer import DFlashProposer
from cppbatch.engine.speculation.draft_cells import DraftCells
from cppbatch.engine.speculation.head_proposer import HeadProposer
from cppbatch.engine.speculation.row_proposer import RowProposer
from cppbatch.llama import Batch, HeadBatch, RowBatch
from tests.support.fakes import EOG, LOGITS, N_MOODS, N_VOCAB, FakeContext

Rows = npt.NDArray[np.float32]
N_EMBD = 4


def hidden_row(crc: int, n: int, *, of_head: bool = False) -> list[float]:
    """The hidden row after a text of `n` tokens with this CRC, as the fake model or its head yields it."""
    return [crc >> 16, crc & 0xFFFF, n, of_head]


class _Cell(NamedTuple):
    number: int
    token: int
    crc: int
    """Of the text up to its token."""
    is_guess: bool
    """Whether it was computed from a row of the head."""


class FakeCells:
    """Cells of each sequence by position, from any position on. `fail_at`: the decode (from 1) that raises `error`."""

    n_row = N_EMBD

    def __init__(self, *, n_ctx: int, n_batch: int, n_seq_max: int, wrong_each: int = 4) -> None:
        self.n_ctx, self.n_batch, self.n_seq_max = n_ctx, n_batch, n_seq_max
        self.wrong_each = wrong_each
        self.cells: list[dict[int, _Cell]] = [{} for _ in range(n_seq_max)]
        self.n_decoded = 0
        self.fail_at = 0
        self.error: BaseException = RuntimeError("made to fail")
        self.closed = False
        self.error_of_opening: Exception | None = None
        self._numbers = itertools.count()

    def use_threads(self, n: int) -> None:
        raise AssertionError("a fake computes without threads")

    @property
    def n_used(self) -> int:
        return len({cell.number for held in self.cells for cell in held.values()})

    def _begin(self, batch: Batch) -> None:
        assert not self.closed
        assert 1 <= batch.n_tokens <= self.n_batch
        self.n_decoded += 1
        if self.n_decoded == self.fail_at:
            raise self.error

    def _logits(self, crcs: Sequence[int]) -> Rows:
        return np.array([np.roll(LOGITS[crc % N_MOODS], crc % self.wrong_each == 0) for crc in crcs])

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool:
        assert stop < 0
        self.cells[seq_id] = {position: cell for position, cell in self.cells[seq_id].items() if position < start}
        return True

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        assert not self.cells[target], f"seq_id {target} holds cells already"
        assert start == 0 < stop <= 1 + max(self.cells[source])
        copied = {position: cell for position, cell in self.cells[source].items() if position < stop}
        assert not any(cell.is_guess for cell in copied.values()), "guesses are shared"
        self.cells[target] = copied

    def clear(self) -> None:
        self.cells = [{} for _ in range(self.n_seq_max)]

    def close(self) -> None:
        self.closed = True

    def open_again(self) -> None:
        assert self.closed
        if self.error_of_opening:
            raise self.error_of_opening
        self.closed = False
        self.clear()


class FakeHeadContext(FakeCells):
    """Cells of a head, or of EAGLE-3.

    A token is computed from the CRC of the text before it, which its hidden row contains, so a row of another sequence
    or another token makes another CRC than that of the next row. Its logits are those of the model, but for one text in
    `wrong_each`.
    """

    reads_first = True

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.n_logits = self.n_batch
        self._outputs: list[tuple[int, int]] = []

    def new_batch(self) -> HeadBatch:
        return HeadBatch(self.n_batch, N_EMBD)

    def decode(self, batch: Batch) -> None:
        assert isinstance(batch, HeadBatch)
        n = batch.n_tokens
        self._begin(batch)
        self._outputs = []
        wants = batch.wants_logits[:n].tolist()
        assert len(set(wants)) == 1, "some heads yield wrong rows beside tokens without logits"
        for i in range(n):
            self._compute(int(batch.tokens[i]), int(batch.positions[i]), int(batch.seq_ids[i]), batch.hidden[i])
            if wants[i]:
                self._outputs.append(
                    (self.cells[batch.seq_ids[i]][int(batch.positions[i])].crc, batch.positions[i] + 1)
                )
        assert self.n_used <= self.n_ctx, f"{self.n_used} cells used of {self.n_ctx}"

    def _compute(self, token: int, position: int, seq_id: int, row: Rows) -> None:
        high, low, n, is_guess = map(int, row)
        held = self.cells[seq_id]
        crc = (high << 16) + low
        assert 0 <= token < N_VOCAB
        assert n == position, f"position {position} gets the hidden row behind {n} tokens"
        if held:
            assert max(held) == position - 1, f"position {position} behind {max(held)}"
            last = held[position - 1]
            assert crc == last.crc, f"position {position} gets the hidden row of another text"
            assert is_guess or not last.is_guess, "a known token behind a guess"
        held[position] = _Cell(next(self._numbers), token, zlib.crc32(bytes([token]), crc), bool(is_guess))

    def logits(self, n_outputs: int) -> Rows:
        assert n_outputs == len(self._outputs)
        return self._logits([crc for crc, _ in self._outputs])

    def encode(self, rows: Rows) -> Rows:
        return rows

    def hidden_rows(self, n: int) -> Rows:
        assert n <= len(self._outputs)
        return np.array([hidden_row(crc, n, of_head=True) for crc, n in self._outputs[:n]], np.float32)


_ENCODED = 1 << 12


class FakeEagleContext(FakeHeadContext):
    """It reads no first token, and rows that it has encoded itself."""

    reads_first = False

    def encode(self, rows: Rows) -> Rows:
        assert not rows[:, 3].any()
        return rows + np.array([0, 0, _ENCODED, 0], np.float32)

    def _compute(self, token: int, position: int, seq_id: int, row: Rows) -> None:
        assert position > 0
        if not row[3]:
            assert row[2] > _ENCODED, "a row that is not encoded"
            row = row - np.array([0, 0, _ENCODED, 0], np.float32)
        super()._compute(token, position, seq_id, row)


class FakeDFlashContext(FakeCells):
    """Cells of DFlash: each has the CRC of the text up to its token, which the row of this token contains. A block
    drafts what the model would choose, wrong from a text in `wrong_each` on."""

    block = 5

    def logits(self, n_outputs: int) -> Rows:
        raise AssertionError("the drafts of a block are read by `draft`")

    def new_rows(self) -> RowBatch:
        return RowBatch(self.n_batch, N_EMBD)

    def decode(self, batch: Batch) -> None:
        assert isinstance(batch, RowBatch)
        self._begin(batch)
        for i in range(batch.n_tokens):
            high, low, n, _ = map(int, batch.vectors[i])
            position, held = int(batch.positions[i]), self.cells[batch.seq_ids[i]]
            assert n == position + 1, f"position {position} gets the row of token {n - 1}"
            assert not held or max(held) == position - 1, f"position {position} after {max(held)}"
            held[position] = _Cell(next(self._numbers), -1, (high << 16) + low, is_guess=False)
        assert self.n_used <= self.n_ctx, f"{self.n_used} cells used of {self.n_ctx}"

    def draft(self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int]) -> Any:
        batch = Batch(self.n_batch)
        for token, position, seq_id in zip(tokens, positions, seq_ids, strict=True):
            batch.add_run(np.full(self.block, token, np.int32), position, seq_id, n_logits=self.block)
        self._begin(batch)
        assert len(set(seq_ids)) == len(seq_ids)
        assert self.n_used + batch.n_tokens <= self.n_ctx, "no cells for the blocks"
        crcs = [
            zlib.crc32(bytes([token]), self._last(i, at))
            for token, at, i in zip(tokens, positions, seq_ids, strict=True)
        ]
        found, probabilities = [], []
        for _ in range(self.block - 1):
            rows = self._logits(crcs)
            found.append(rows.argmax(axis=1))
            probabilities.append(1 / np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1))
            crcs = [zlib.crc32(bytes([token]), crc) for token, crc in zip(found[-1].tolist(), crcs, strict=True)]
        return np.array(found, np.int32).T, np.array(probabilities).T

    def _last(self, seq_id: int, position: int) -> int:
        held = self.cells[seq_id]
        assert max(held) == position - 1, f"a block at {position} after {max(held)}"
        return held[position - 1].crc


CONTEXTS: dict[str, type[FakeCells]] = {
    "mtp": FakeHeadContext,
    "chain": FakeHeadContext,
    "eagle3": FakeEagleContext,
    "dflash": FakeDFlashContext,
}


def fake_head(
    context: FakeContext, clock: Callable[[], float], *, wrong_each: int = 4, kind: str = "mtp"
) -> RowProposer:
    """The head or draft model of a fake model, with the number of cells of its context."""
    n_batch = max(context.n_batch, 3 * context.n_seq_max, FakeDFlashContext.block)
    sizes = {"n_ctx": context.n_ctx, "n_batch": n_batch, "n_seq_max": context.n_seq_max, "wrong_each": wrong_each}
    head = CONTEXTS[kind](**sizes)
    context.gives_hidden_rows = True
    if isinstance(head, FakeDFlashContext):
        return DFlashProposer(head, context.hidden_rows, context.n_ctx, EOG, clock=clock)
    assert isinstance(head, FakeHeadContext)
    if kind == "chain":
        heads = [head, FakeHeadContext(**sizes), FakeHeadContext(**sizes)]
        return ChainProposer(heads, context.hidden_rows, context.n_ctx, EOG, clock=clock)
    return HeadProposer(head, context.hidden_rows, context.n_ctx, EOG, clock=clock)


def check_head(proposer: RowProposer) -> None:
    """The accounting of its cells is what its context holds, all of them of the text that the sequence has."""
    for each in proposer.heads if isinstance(proposer, ChainProposer) else [proposer]:
        _check_cells(each)
    assert len(proposer._rows) <= 2 * proposer._context.n_seq_max, "hidden rows of preempted sequences are kept"


def _check_cells(proposer: RowProposer) -> None:
    context = proposer._row_context
    assert isinstance(context, FakeCells)
    cells = proposer.cells
    assert isinstance(cells, DraftCells)
    for draft in cells.all:
        held = context.cells[draft.seq_id]
        assert sorted(held) == list(range(draft.start, draft.position)) if held else draft.n_cells == 0
        assert not any(held[position].is_guess for position in range(draft.start, draft.n_known) if held)
        for position in range(draft.start, draft.n_known) if held else ():
            if isinstance(context, FakeDFlashContext):
                assert held[position].crc == zlib.crc32(bytes(draft.tokens[: position + 1].tolist()))
            else:
                assert held[position].token == draft.tokens[position]
    assert cells.n_free == context.n_ctx - context.n_used
