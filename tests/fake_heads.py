"""A draft head of the fake model: it knows the text only by the hidden rows, and refuses wrong ones."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cppbatch.engine.speculation.head_proposer import HeadProposer
from cppbatch.llama import Batch, HeadBatch
from tests.fakes import EOG, LOGITS, N_MOODS, N_VOCAB, FakeContext

Rows = npt.NDArray[np.float32]
N_EMBD = 4


def hidden_row(crc: int, n: int, *, of_head: bool = False) -> list[float]:
    """The hidden row behind a text of `n` tokens with this CRC, as the fake model or its head yields it."""
    return [crc >> 16, crc & 0xFFFF, n, of_head]


class _Cell(NamedTuple):
    number: int
    token: int
    crc: int
    """Of the text up to its token."""
    is_guess: bool
    """Whether it was computed from a row of the head."""


class FakeHeadContext:
    """Cells of a head: of each sequence by position, from any position on.

    A token is computed from the CRC of the text before it, which its hidden row contains, so a row of another sequence
    or another token makes another CRC than that of the next row. Its logits are those of the model, but for one text in
    `wrong_each`. `fail_at`: the decode (from 1) that raises `error`.
    """

    def __init__(self, *, n_ctx: int, n_batch: int, n_seq_max: int, wrong_each: int = 4) -> None:
        self.n_ctx, self.n_batch, self.n_seq_max = n_ctx, n_batch, n_seq_max
        self.wrong_each = wrong_each
        self.cells: list[dict[int, _Cell]] = [{} for _ in range(n_seq_max)]
        self.n_decoded = 0
        self.fail_at = 0
        self.error: BaseException = RuntimeError("made to fail")
        self.closed = False
        self._numbers = itertools.count()
        self._outputs: list[tuple[int, int]] = []

    def use_threads(self, n: int) -> None:
        raise AssertionError("a fake computes without threads")

    def new_batch(self) -> HeadBatch:
        return HeadBatch(self.n_batch, N_EMBD)

    @property
    def n_used(self) -> int:
        return len({cell.number for held in self.cells for cell in held.values()})

    def decode(self, batch: Batch) -> None:
        assert isinstance(batch, HeadBatch)
        n = batch.n_tokens
        assert 1 <= n <= self.n_batch
        self.n_decoded += 1
        if self.n_decoded == self.fail_at:
            raise self.error
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
        return np.array([np.roll(LOGITS[crc % N_MOODS], crc % self.wrong_each == 0) for crc, _ in self._outputs])

    def hidden_rows(self, n: int) -> Rows:
        assert n <= len(self._outputs)
        return np.array([hidden_row(crc, n, of_head=True) for crc, n in self._outputs[:n]], np.float32)

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


def fake_head(context: FakeContext, clock: Callable[[], float], *, wrong_each: int = 4) -> HeadProposer:
    """The head of a fake model, with as many cells as its context."""
    head = FakeHeadContext(
        n_ctx=context.n_ctx, n_batch=max(context.n_batch, context.n_seq_max), n_seq_max=context.n_seq_max,
        wrong_each=wrong_each,
    )  # fmt: skip
    context.gives_hidden_rows = True
    return HeadProposer(head, context.hidden_rows, context.n_ctx, EOG, clock=clock)


def check_head(proposer: HeadProposer) -> None:
    """The accounting of its cells is what its context holds, all of them of the text that the sequence has."""
    context = proposer._head
    assert isinstance(context, FakeHeadContext)
    for draft in proposer.cells.all:
        held = context.cells[draft.seq_id]
        assert sorted(held) == list(range(draft.start, draft.position)) if held else draft.n_cells == 0
        known = [held[position].token for position in range(draft.start, draft.n_known)] if held else []
        assert known == draft.tokens[draft.start : draft.n_known].tolist() or not held
        assert not any(held[position].is_guess for position in range(draft.start, draft.n_known) if held)
    assert proposer.cells.n_free == context.n_ctx - context.n_used
    assert len(proposer._rows) <= 2 * context.n_seq_max, "hidden rows of preempted sequences are kept"
