"""What tests of a native context share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cppbatch.llama import Batch, Context

PROMPT = np.arange(10, 40, dtype=np.int32)

Row = npt.NDArray[np.float32]


def decode(context: Context, tokens: Sequence[int] | npt.NDArray[np.int32], seq_id: int = 0, position: int = 0) -> Row:
    """The logits after the last of `tokens`."""
    batch = Batch(context.n_batch)
    batch.add_run(np.asarray(tokens, np.int32), position, seq_id, n_logits=1)
    context.decode(batch)
    row: Row = context.logits(1)[0].copy()
    return row


def close(a: Row, b: Row) -> bool:
    """Whether two rows of logits are equal but for the order of sums."""
    return bool(np.allclose(a, b, rtol=0, atol=0.05))
