"""Padding: tokens that no sequence needs, computed with the others in a step, and then removed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cppbatch.engine.sequence import Seq


class PaddingRow:
    """Token 0 at a position that is removed after the step: the first of a spare seq_id, or one after a sequence.

    In a step with drafts, it may have as many tokens as the rows.
    With rows that have logits, it has unused logits too, so that the output matrix also gets whole tiles of rows.
    (Without them, 15 rows with one padding row took 15.1 ms, compared with 14.2 for 16 rows and 12.4 for 15 rows with
    padded logits; Q4_0 on two AVX-512 cores.)
    """

    __slots__ = ("n_computed", "position", "seq_id", "tokens", "wants_logits")

    def __init__(self, seq_id: int, position: int = 0, *, wants_logits: bool = True) -> None:
        self.seq_id, self.tokens, self.wants_logits = seq_id, _ZEROS, wants_logits
        self.n_computed = self.position = position

    def n_logits(self, n: int) -> int:
        """See `Seq.n_logits`."""
        return n if self.wants_logits else 0


_ZEROS = np.broadcast_to(np.zeros((), np.int32), (2**31 - 1,))  # takes no memory

BatchEntry = tuple[Seq | PaddingRow, int]


def with_min_rows(
    rows: Iterable[BatchEntry], prefill: Iterable[tuple[Seq, int]], *, ubatch_tokens: int, min_rows: int
) -> list[BatchEntry]:
    """The batch of these decode rows and prompt pieces in which each ubatch computes at least `min_rows` tokens, and
    at least as many rows of logits or none.

    With streams, llama.cpp forms a ubatch from consecutive ascending seq_ids, wherever they are in the batch, and
    computes as many tokens of each as the shortest has. So groups of consecutive rows (with equally many draft tokens),
    and each prompt piece separately, are listed by descending seq_id. Padding rows follow each row of a group that is
    too small, a piece that is the end of its prompt, and one whose last ubatch is too small.
    """
    parts: list[list[BatchEntry]] = []
    for row in sorted(rows, key=_seq_id):
        if parts and _seq_id(parts[-1][-1]) + 1 == _seq_id(row) and row[1] == parts[-1][-1][1]:
            parts[-1].append(row)
        else:
            parts.append([row])
    batch = [_padded(part, padded_size(len(part), min_rows) // len(part) - part[0][1]) for part in parts]
    for sequence, n in prefill:
        last = n % ubatch_tokens  # tokens of its last ubatch; 0: all
        n_more = min_rows - 1 if n == sequence.n_pending else min_rows - last if last else 0
        batch.append(_padded([(sequence, n)], n_more))
    batch.sort(key=lambda part: _seq_id(part[0]), reverse=True)
    return [entry for part in batch for entry in part]


def padded_size(n_rows: int, min_rows: int) -> int:
    """The number of rows of a group after `with_min_rows`: each row gets the same number of padding rows."""
    return n_rows * -(-min_rows // n_rows)


def tokens_before_padding(n: int, *, ubatch_tokens: int, min_rows: int) -> int:
    """How many of `n` tokens at the end of a prompt fit into ubatches together with their padding rows."""
    last = n % ubatch_tokens or ubatch_tokens
    return n - max(0, last + min_rows - 1 - ubatch_tokens)


def _padded(part: list[BatchEntry], n_more: int) -> list[BatchEntry]:
    """The entries, each followed by `n_more` padding rows."""
    padded: list[BatchEntry] = []
    for sequence, n in part:
        start, wants_logits = sequence.position + n, sequence.n_logits(n) > 0
        more = [PaddingRow(sequence.seq_id, start + i, wants_logits=wants_logits) for i in range(n_more)]
        padded += [(sequence, n), *((row, 1) for row in more)]
    return padded


def _seq_id(entry: BatchEntry) -> int:
    return entry[0].seq_id
