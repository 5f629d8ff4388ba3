"""Embeddings as numpy vectors. Its own module: who only talks to an engine needs no llama.cpp."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.errors import InvalidRequest

Vector = npt.NDArray[np.float32]


def vector_of(embedding: bytes) -> Vector:
    """`GenerationEvent.embedding` as float32[n_embd]; read-only."""
    return np.frombuffer(embedding, "<f4").astype(np.float32, copy=False)


def check_dimensions(dimensions: int | None, n_embd: int) -> None:
    """Raises `InvalidRequest` when vectors of `n_embd` numbers cannot be cut to so many; None: they stay whole."""
    if dimensions is not None and not 1 <= dimensions <= n_embd:
        raise InvalidRequest("dimensions", f"is {dimensions}; this model's vectors have {n_embd}, give 1 to {n_embd}")


def normalised(vectors: Vector, dimensions: int | None = None) -> Vector:
    """Vectors of length 1, float32[..., dimensions], so that a dot product is their cosine similarity.

    `vectors`: float32[..., n_embd]. `dimensions`: keep the first so many of each (models trained for it, by Matryoshka
    representation learning, lose little); None: all. A vector of zeros stays one. Raises `InvalidRequest` for more
    dimensions than there are, or less than one.
    """
    check_dimensions(dimensions, vectors.shape[-1])
    kept = vectors[..., :dimensions].astype(np.float64)  # squares of large numbers would overflow float32
    lengths = np.linalg.norm(kept, axis=-1, keepdims=True)
    result: Vector = (kept / np.where(lengths, lengths, 1)).astype(np.float32)
    return result
