"""The batch of a step: which tokens of which sequences, with which padding, in which order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TypeVar

import numpy as np

from cppbatch.engine.sequence import Seq
from cppbatch.setting import INT32_MAX

_NEAR_CELLS = 1024  # cells: decode rows computed with the first token of a prompt also iterate over its cells


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


_ZEROS = np.broadcast_to(np.zeros((), np.int32), (INT32_MAX,))  # takes no memory


class PromptPart:
    """A part of the tokens that a prompt computes in a step: the first one, or those from the second on.

    The first one is computed among the decode rows. The others follow all rows in the batch, so that rows of logits are
    computed in batch order: llama.cpp sorts other orders by swapping whole rows, which took up to 25 ms with 64 rows
    and a vocabulary of 128,256.
    """

    __slots__ = ("n_before", "n_computed", "n_pending", "position", "seq_id", "sequence", "tokens")

    def __init__(self, sequence: Seq, n_before: int) -> None:
        """`n_before`: 0 for the first token, 1 for the others."""
        self.sequence, self.n_before = sequence, n_before
        self.tokens, self.seq_id = sequence.tokens, sequence.seq_id
        self.position, self.n_computed = sequence.position + n_before, sequence.n_computed + n_before
        self.n_pending = sequence.n_pending - n_before

    def n_logits(self, n: int) -> int:
        """See `Seq.n_logits`."""
        return self.sequence.n_logits(self.n_before + n) if self.n_before else 0


BatchEntry = tuple[Seq | PaddingRow | PromptPart, int]
Entry = TypeVar("Entry", bound=BatchEntry)


def in_batch_order(rows: list[Entry], prefill: list[Entry], *, gpu_ubatch: int = 0) -> list[Entry]:
    """First the rows by ascending seq_id, with the tokens computed among them; then the other prompt pieces.

    In the per-sequence layout and in recurrent models, llama.cpp computes consecutive ascending seq_ids together,
    wherever they are in the batch: of each, as many tokens as the shortest has, over as many cells as the longest has.
    Listed by descending seq_id, prompt pieces are computed one by one. One prompt may follow the rows' seq_ids: its
    first token joins them, unless it is far longer.

    On a CPU, short pieces are computed together, long ones one by one: together, each gets a small part of a ubatch,
    for which attention is slower. `gpu_ubatch`: the tokens of a ubatch on a GPU. There, each ubatch costs as much as
    100 more tokens (an 8B in Q4_0 on an H100), so neighbours are computed together if that takes fewer ubatches: 16
    prompts of 128 tokens do (1.6 times as fast), 15 of different lengths do not.
    """
    rows.sort(key=_seq_id)
    prefill.sort(key=_seq_id)
    if gpu_ubatch:
        prefill = [piece for run in _neighbours(prefill) for piece in _fewest_ubatches(run, gpu_ubatch)]
    # ggml's flash attention is faster with at least 64 tokens of a sequence
    elif any(n >= 128 for _, n in prefill):
        prefill.reverse()
    if not rows or not prefill:
        return rows + prefill
    following = rows[-1][0].seq_id + 1
    most = max(entry.n_computed for entry, _ in rows) + _NEAR_CELLS
    first = [piece for piece in prefill if piece[0].seq_id == following and piece[0].n_computed > most]
    return first + rows + [piece for piece in prefill if piece not in first]


def _neighbours(pieces: list[Entry]) -> list[list[Entry]]:
    """Runs of consecutive seq_ids."""
    runs: list[list[Entry]] = []
    for piece in pieces:
        if runs and _seq_id(piece) == _seq_id(runs[-1][-1]) + 1:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _fewest_ubatches(run: list[Entry], ubatch_tokens: int) -> list[Entry]:
    """A run by ascending seq_id, or by descending."""
    lengths = [n for _, n in run]
    one_by_one = sum(-(-n // ubatch_tokens) for n in lengths)
    return run if _n_ubatches(lengths, ubatch_tokens) < one_by_one else run[::-1]


def _n_ubatches(lengths: list[int], ubatch_tokens: int) -> int:
    """The number of ubatches of pieces with consecutive seq_ids, which are computed together until the shortest ends;
    then the pieces on either side of it are."""
    shortest = min(lengths)
    left = [n - shortest for n in lengths]
    runs = [list(run) for is_left, run in groupby(left, bool) if is_left]
    together = -(-shortest // max(1, ubatch_tokens // len(lengths)))
    return together + sum(_n_ubatches(run, ubatch_tokens) for run in runs)


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
    batch = [_pad(part, padded_size(len(part), min_rows) // len(part) - part[0][1]) for part in parts]
    for sequence, n in prefill:
        last = n % ubatch_tokens  # tokens of its last ubatch; 0: all
        n_more = min_rows - 1 if n == sequence.n_pending else min_rows - last if last else 0
        batch.append(_pad([(sequence, n)], n_more))
    batch.sort(key=lambda part: _seq_id(part[0]), reverse=True)
    return [entry for part in batch for entry in part]


def padded_size(n_rows: int, min_rows: int) -> int:
    """The number of rows of a group after `with_min_rows`: each row gets the same number of padding rows."""
    return n_rows * -(-min_rows // n_rows)


def tokens_before_padding(n: int, *, ubatch_tokens: int, min_rows: int) -> int:
    """How many of `n` tokens at the end of a prompt fit into ubatches together with their padding rows."""
    last = n % ubatch_tokens or ubatch_tokens
    return n - max(0, last + min_rows - 1 - ubatch_tokens)


def _pad(part: list[BatchEntry], n_more: int) -> list[BatchEntry]:
    """The entries, each followed by `n_more` padding rows."""
    padded: list[BatchEntry] = []
    for sequence, n in part:
        start, wants_logits = sequence.position + n, sequence.n_logits(n) > 0
        more = [PaddingRow(sequence.seq_id, start + i, wants_logits=wants_logits) for i in range(n_more)]
        padded += [(sequence, n), *((row, 1) for row in more)]
    return padded


def _seq_id(entry: BatchEntry) -> int:
    return entry[0].seq_id
