"""The `llama_batch` of a decode of pictures and sound: vectors in place of tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.llama.llama_batch import Batch

FloatArray = npt.NDArray[np.float32]


class PendingVectors(Protocol):
    """A sequence with vectors to compute (`cppbatch.engine.sequence.Seq`): those from `n_computed` on are pending."""

    n_computed: int
    seq_id: int

    def media_vectors(self, n: int) -> FloatArray:
        """The next `n` pending vectors, float32[n, n_embd]."""
        ...


class EmbeddingBatch(Batch):
    """Up to `capacity` vectors for one `llama_decode`. None of them wants logits.

    llama.cpp reads `vectors`, float32[capacity, n_embd], in place of token ids; see `Batch` for the others.
    """

    def __init__(self, capacity: int, n_embd: int) -> None:
        super().__init__(capacity)
        self.vectors: FloatArray = np.empty((capacity, n_embd), np.float32)

    def _make_struct(self) -> Any:
        struct = super()._make_struct()
        struct.token = None
        struct.embd = self.vectors.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return struct

    def refill_vectors(self, entries: Sequence[tuple[PendingVectors, int]]) -> None:
        """Clears the batch and writes the next `n` pending vectors of each sequence into it."""
        self.clear()
        for sequence, n in entries:
            self.add_vectors(sequence.media_vectors(n), sequence.n_computed, sequence.seq_id)

    def add_vectors(self, vectors: FloatArray, position: int, seq_id: int) -> None:
        """Appends vectors of one sequence, float32[n, n_embd], at consecutive positions from `position` on."""
        start, stop = self._extend(len(vectors))
        self.vectors[start:stop] = vectors
        self.positions[start:stop] = np.arange(position, position + stop - start, dtype=np.int32)
        self.seq_ids[start:stop] = seq_id
        self.wants_logits[start:stop] = 0
