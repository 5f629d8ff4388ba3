"""The parts of a batch that llama.cpp must compute one after another: its results would be wrong for the whole batch.

Each rule has a test with a tiny model (tests/integration/test_batch_parts.py), and can be removed once llama.cpp
fixes the bug:

- Sliding windows: llama.cpp finds cells for all ubatches of a batch before it computes the first one. Cells that a
  later ubatch drops from a window are then already missing (`llama_kv_cache::prepare` restores overwritten cells, but
  not those that `apply_ubatch` purges), although tokens of an earlier ubatch attend to them. So each ubatch is a
  separate decode.
- PLaMo 2: with several sequences in a ubatch, its graph writes their states to wrong places, or aborts (the offset
  `kv_head * n_seqs` in `build_plamo2_mamba_layer`). So each sequence is a separate decode.
- CogVLM: its graph computes logits of all tokens (no `build_inp_out_ids`), and llama.cpp copies the first ones. So
  the batch requests logits of all tokens.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from cppbatch.llama.llama_batch import Batch

HIDDEN_WINDOWS = frozenset({"deepseek4"})
"""Architectures with a window for which `llama_model_n_swa` returns 0, because tokens in it cannot be removed."""
SEQUENCES_ALONE = frozenset({"plamo2"})
"""Architectures that require one sequence per ubatch."""
ALL_ROWS = frozenset({"cogvlm"})
"""Architectures that always compute logits of all tokens."""

Part = tuple[int, int]
"""The entries of a batch from the first number to the second one."""


def parts_of(
    batch: Batch, *, architecture: str, n_swa: int, n_ubatch: int, n_rows: int, has_streams: bool, keeps_whole: bool
) -> list[Part]:
    """The parts of a batch; usually a single one.

    `n_rows`: rows of logits of a part at most; 0: any number. `has_streams`: as `Context.has_streams`. `keeps_whole`:
    only the number of rows divides it.
    """
    alone, parts = architecture in SEQUENCES_ALONE, [(0, batch.n_tokens)]
    if not keeps_whole and (n_swa or alone or architecture in HIDDEN_WINDOWS):
        parts = single_ubatches(batch, n_ubatch, equal_runs=has_streams, alone=alone)
    if n_rows and batch.n_outputs > n_rows:
        parts = [part for each in parts for part in parts_of_rows(batch, each, n_rows)]
    return parts


def single_ubatches(batch: Batch, n_ubatch: int, *, equal_runs: bool, alone: bool = False) -> list[Part]:
    """Parts that llama.cpp computes as one ubatch each.

    `equal_runs`: a ubatch has the same number of tokens of each sequence. `alone`: a ubatch has a single sequence.
    """
    n = batch.n_tokens
    if not equal_runs:
        return [(i, min(i + n_ubatch, n)) for i in range(0, n, n_ubatch)]
    bounds = np.flatnonzero(np.diff(batch.seq_ids[:n], prepend=-1, append=-1)).tolist()
    parts: list[Part] = []
    length = 0  # of the runs of the last part
    for start, stop in pairwise(bounds):
        if parts and not alone and stop - start == length and stop - parts[-1][0] <= n_ubatch:
            parts[-1] = parts[-1][0], stop
        else:
            parts += [(i, min(i + n_ubatch, stop)) for i in range(start, stop, n_ubatch)]
            length = stop - parts[-1][0]
    return parts


def parts_of_rows(batch: Batch, part: Part, n_rows: int) -> list[Part]:
    """A part of a batch as parts with at most `n_rows` rows of logits each."""
    start, stop = part
    rows = np.flatnonzero(batch.wants_logits[start:stop])
    bounds = [start, *(start + int(last) + 1 for last in rows[n_rows - 1 :: n_rows]), stop]
    return [(a, b) for a, b in pairwise(bounds) if a < b]
