"""Embeddings as numpy vectors. Does not need llama.cpp, so that clients of an engine can import it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.errors import InvalidRequest

Vector = npt.NDArray[np.float32]


def vector_of(embedding: bytes) -> Vector:
    """`GenerationEvent.embedding` as float32[n_embd]; read-only."""
    return np.frombuffer(embedding, "<f4").astype(np.float32, copy=False)


def check_dimensions(dimensions: int | None, n_embd: int) -> None:
    """Raises `InvalidRequest` unless `dimensions` is None (whole vectors) or from 1 to `n_embd`."""
    if dimensions is not None and not 1 <= dimensions <= n_embd:
        raise InvalidRequest(
            "dimensions", f"is {dimensions}; it must be from 1 to {n_embd}, the size of this model's vectors"
        )


AS_COMPUTED, TO_INT16, LENGTH_1 = -1, 0, 2
"""llama.cpp's --embd-normalize: not normalised; the largest number is 32,760; of length 1. Other numbers above 0: the
norm of this order is 1."""


def normalise_vectors(vectors: Vector, dimensions: int | None = None, norm: int = LENGTH_1) -> Vector:
    """Vectors of length 1, float32[..., dimensions]: their dot product is their cosine similarity. `norm`: another one
    in place of the length.

    `vectors`: float32[..., n_embd]. `dimensions`: keep the first numbers of each vector (models trained for this with
    Matryoshka representation learning lose little); None: all. Zero vectors stay zero. Raises `InvalidRequest` for an
    invalid number of dimensions.
    """
    check_dimensions(dimensions, vectors.shape[-1])
    kept = vectors[..., :dimensions].astype(np.float64)  # squares of large numbers would overflow float32
    if norm == AS_COMPUTED:
        return kept.astype(np.float32)
    order = np.inf if norm == TO_INT16 else norm
    lengths = np.linalg.norm(kept, ord=order, axis=-1, keepdims=True) / (32_760 if norm == TO_INT16 else 1)
    result: Vector = (kept / np.where(lengths, lengths, 1)).astype(np.float32)
    return result
