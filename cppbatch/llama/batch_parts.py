"""How a batch is computed where llama.cpp's results are wrong for the whole batch in one `llama_decode`.

Each rule has a test with a tiny model (tests/integration/test_batch_parts.py), and goes away with the mistake:

- Sliding windows: llama.cpp finds cells for all ubatches of a batch before it computes the first one. What a later one
  makes it drop from a window is missing then already (`llama_kv_cache::prepare` restores overwritten cells, but not
  those that `apply_ubatch` purges), though tokens of an earlier one see it. So each ubatch is a decode of its own.
- PLaMo 2: with several sequences in a ubatch its graph writes their states to wrong places, or aborts (the offset
  `kv_head * n_seqs` in `build_plamo2_mamba_layer`). So each sequence is a decode of its own.
- CogVLM: its graph computes logits of all tokens (no `build_inp_out_ids`), and llama.cpp copies the first ones. So
  logits of all tokens are asked for.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from cppbatch.llama.llama_batch import Batch

HIDDEN_WINDOWS = frozenset({"deepseek4"})
"""Architectures with a window of which `llama_model_n_swa` says 0, since tokens in it cannot be removed."""
SEQUENCES_ALONE = frozenset({"plamo2"})
"""Architectures whose ubatches have one sequence."""
ALL_ROWS = frozenset({"cogvlm"})
"""Architectures that compute logits of all tokens, whichever want them."""

Part = tuple[int, int]
"""The entries of a batch from the first number to the second one."""


def single_ubatches(batch: Batch, n_ubatch: int, *, equal_runs: bool, alone: bool = False) -> list[Part]:
    """Parts of which llama.cpp computes each as one ubatch.

    `equal_runs`: a ubatch has equally many tokens of each sequence. `alone`: and of one sequence only.
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
