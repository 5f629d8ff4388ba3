"""The `llama_batch` of a decode of pictures and sound: vectors in place of tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.llama.llama_batch import Batch, Int32Array

FloatArray = npt.NDArray[np.float32]


class PendingVectors(Protocol):
    """A sequence with vectors to compute (`cppbatch.engine.sequence.Seq`)."""

    seq_id: int

    def media_vectors(self, n: int) -> FloatArray:
        """The next `n` pending vectors, float32[n, n_embd]."""
        ...

    def media_positions(self, n: int) -> Int32Array:
        """Their positions, int32[n_dimensions, n]."""
        ...


class EmbeddingBatch(Batch):
    """Up to `capacity` vectors for one `llama_decode`. None of them wants logits.

    llama.cpp reads `vectors`, float32[capacity, n_embd], in place of token ids; see `Batch` for the others. `positions`
    has those of all vectors in the first dimension, then those in the second, and so on.
    """

    def __init__(self, capacity: int, n_embd: int, n_dimensions: int = 1) -> None:
        """`n_dimensions`: of the positions (`Model.n_dimensions`)."""
        super().__init__(capacity)
        self.n_dimensions = n_dimensions
        self.positions = np.zeros(n_dimensions * capacity, np.int32)
        self.vectors: FloatArray = np.empty((capacity, n_embd), np.float32)

    def _make_struct(self, start: int = 0) -> Any:
        struct = super()._make_struct(start)
        struct.token = None
        struct.embd = self.vectors[start:].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return struct

    def refill_vectors(self, entries: Sequence[tuple[PendingVectors, int]]) -> None:
        """Clears the batch and writes the next `n` pending vectors of each sequence into it."""
        self.clear()
        self._extend(sum(n for _, n in entries))
        positions, stop = self.positions_by_dimension, 0
        for sequence, n in entries:
            start, stop = stop, stop + n
            self.vectors[start:stop] = sequence.media_vectors(n)
            positions[:, start:stop] = sequence.media_positions(n)
            self.seq_ids[start:stop] = sequence.seq_id
            self.wants_logits[start:stop] = 0

    @property
    def positions_by_dimension(self) -> Int32Array:
        """A view of the valid positions, int32[n_dimensions, n_tokens]."""
        return self.positions[: self.n_dimensions * self.n_tokens].reshape(self.n_dimensions, self.n_tokens)
