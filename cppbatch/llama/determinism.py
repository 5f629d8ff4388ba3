"""Probes whether the logits of a sequence depend on what else is computed with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cppbatch.llama.context import Context
from cppbatch.llama.llama_batch import Batch

_N_PROMPT = 24  # tokens
_PIECES = (5, 17)
_MAX_ROWS = 16


def logits_are_independent(context: Context) -> bool:
    """Whether the logits are the same bit for bit for every number of rows and all pieces of the prompt.

    False for float weights, whose kernel for one row adds in another order. This is about the weights: in attention,
    the order is the same if the layout and the types of the cache are those of `--deterministic`. Takes about 30
    decodes. The context must be empty and is empty again afterwards.
    """
    n_vocab = context.model.vocab.n_tokens
    tokens = np.linspace(1, n_vocab - 1, min(_N_PROMPT, context.n_ctx_seq - 1)).astype(np.int32)
    rows = [n for n in (1, 2, 3, 4, 7, _MAX_ROWS) if n <= context.n_seq_max]
    try:
        expected = _logits(context, tokens, [len(tokens)], 1)
        others = [_logits(context, tokens, [len(tokens)], n) for n in rows]
        others += [_logits(context, tokens, [piece] * (len(tokens) // piece), 1) for piece in _PIECES]
        others.append(_logits(context, tokens, [len(tokens) - 2, 1, 1], 1))
        return all(np.array_equal(expected, each) for each in others)
    finally:
        context.clear()


def _logits(
    context: Context, tokens: npt.NDArray[np.int32], pieces: Sequence[int], n_rows: int
) -> npt.NDArray[np.float32]:
    """The logits of seq_id 0 after a prompt in these pieces and one decode row beside `n_rows` - 1 others."""
    context.clear()
    batch = Batch(len(tokens) + n_rows)
    ends = [*np.cumsum(pieces).tolist()]
    if ends[-1] < len(tokens):
        ends.append(len(tokens))
    for start, end in zip([0, *ends], ends, strict=False):
        batch.clear()
        batch.add_run(tokens[start:end], start, 0, n_logits=0)
        context.decode(batch)
    for seq_id in range(1, n_rows):
        batch.clear()
        batch.add_run(np.resize(tokens[::-1], seq_id + 1), 0, seq_id, n_logits=0)
        context.decode(batch)
    batch.clear()
    lengths = [len(tokens), *(seq_id + 1 for seq_id in range(1, n_rows))]
    batch.add_rows([int(tokens[0])] * n_rows, lengths, list(range(n_rows)))
    context.decode(batch)
    row: npt.NDArray[np.float32] = context.logits(n_rows)[0].copy()
    return row
