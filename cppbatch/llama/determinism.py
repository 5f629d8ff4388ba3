"""Probes whether the logits of a sequence depend on what else is computed with it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.llama.context import Context
from cppbatch.llama.llama_batch import Batch

_N_PROMPT = 40  # tokens: BLAS multiplies matrices of 32 and more rows
_PIECES = (5, 17)
_ROWS = (1, 2, 3, 4, 7, 16, 33)

MIN_ROWS = (1, 2, 8)
"""Candidates for the minimum rows of a ubatch. With float weights, products of a single row use a different kernel;
with Q6_K, Q5_K, Q3_K and IQ4_XS, those of fewer than eight rows (ggml-cpu `llamafile/sgemm.cpp`, `tiled/`)."""

Logits = npt.NDArray[np.float32]


def least_rows_for_equal_bits(context: Context) -> int | None:
    """The smallest of `MIN_ROWS` for which logits are bit-identical for every number of rows and all pieces of a
    prompt, if padding rows fill smaller ubatches; None if there is none.

    This covers the weights, including those of all LoRA adapters. In attention, the order of summation is fixed if the
    layout and types of the cache are those of `--deterministic`. Takes about 70 decodes for each number. The context
    must be empty, and is empty again afterwards.
    """
    try:
        context.use_adapters(tuple((i, 1.0) for i in range(len(context.model.adapters))))
        return next((n for n in MIN_ROWS if _Probe(context, min_rows=n).passes()), None)
    finally:
        context.use_adapters(())
        context.clear()


class _Probe:
    """Computes one prompt in several ways, and decode rows in groups of several sizes."""

    def __init__(self, context: Context, *, min_rows: int) -> None:
        self._context = context
        self._min_rows = min_rows
        self._tokens = np.random.default_rng(0).integers(0, context.model.vocab.n_tokens, _N_PROMPT).astype(np.int32)
        self._batch = Batch(context.n_batch)
        self._most = min(_N_PROMPT, context.n_batch, context.n_ubatch) - max(MIN_ROWS)  # per piece, without padding

    def passes(self) -> bool:
        """Whether the logits are the same in all cases."""
        return self._rows_agree() and self._prompts_agree()

    def _rows_agree(self) -> bool:
        """Whether a decode row's logits are independent of the number of rows in the batch and of its place there."""
        self._context.clear()
        counts = [n for n in _ROWS if n <= self._context.n_seq_max]
        for seq_id in range(counts[-1]):
            self._compute(seq_id, 0, 2 + seq_id % 4, wants_logits=False)
        expected = self._rows(counts[-1])
        return all(np.array_equal(self._rows(n), expected[:n]) for n in counts)

    def _rows(self, n: int) -> Logits:
        """The logits of the next token of each of the first `n` sequences. Does not change their cells."""
        positions = [2 + seq_id % 4 for seq_id in range(n)]
        n_each = -(-self._min_rows // n)
        self._batch.clear()
        for seq_id, position in enumerate(positions):
            self._batch.add_rows([int(self._tokens[position])], [position], [seq_id])
            self._add_padding(n_each - 1, seq_id, position + 1)
        self._context.decode(self._batch)
        rows: Logits = self._context.logits(self._batch.n_outputs)[::n_each].copy()
        for seq_id, position in enumerate(positions):
            self._context.remove_padding(seq_id, position)
        return rows

    def _prompts_agree(self) -> bool:
        """Whether a prompt's last row of logits is independent of the pieces in which the prompt is computed, and of
        the number of other rows in the batch."""
        expected = _Probe(self._context, min_rows=max(MIN_ROWS))._prompt(0, self._most)
        ways = [(0, self._most), *((0, min(piece, self._most)) for piece in _PIECES), (_N_PROMPT - 2, 1)]
        return all(np.array_equal(self._prompt(*way), expected) for way in ways)

    def _prompt(self, start: int, piece: int) -> Logits:
        """The row of the prompt's last token, with the tokens from `start` on computed in pieces."""
        self._context.clear()
        piece_before = min(_PIECES[0], self._most)
        for at in range(0, start, piece_before):
            self._compute(0, at, min(start, at + piece_before), wants_logits=False)
        for at in range(start, _N_PROMPT, piece):
            end = min(_N_PROMPT, at + piece)
            self._compute(0, at, end, wants_logits=end == _N_PROMPT)
        row: Logits = self._context.logits(self._batch.n_outputs)[0].copy()
        return row

    def _compute(self, seq_id: int, start: int, end: int, *, wants_logits: bool) -> None:
        """Computes the tokens from `start` to `end` of a sequence."""
        n_more = self._min_rows - (1 if wants_logits else min(self._min_rows, end - start))
        self._batch.clear()
        self._batch.add_run(self._tokens[start:end], start, seq_id, n_logits=int(wants_logits))
        self._add_padding(n_more, seq_id, end)
        self._context.decode(self._batch)
        if n_more:
            self._context.remove_padding(seq_id, end)

    def _add_padding(self, n: int, seq_id: int, position: int) -> None:
        self._batch.add_rows([0] * n, list(range(position, position + n)), [seq_id] * n)
