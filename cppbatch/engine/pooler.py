"""Reads vectors after a step, where `Sampler` reads logits: for embedding models and rerankers."""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling import SamplerOutput
from cppbatch.engine.scheduler import StepPlan


class Vectors(Protocol):
    """The part of a context that returns vectors (`cppbatch.llama.Context`)."""

    def embedding(self, seq_id: int) -> npt.NDArray[np.float32]: ...
    def token_embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]: ...


class Pooler:
    """Has the interface of `Sampler`; its `SamplerOutput`s have a vector in place of a token.

    `each_token`: they have one vector for each token of the prompt (pooling none).
    """

    def __init__(self, context: Vectors, *, each_token: bool = False) -> None:
        self._context = context
        self._each_token = each_token

    def prepare(self, plan: StepPlan) -> None:
        """Does nothing: every token of an embedding sequence is an output."""

    def sample(self, plan: StepPlan, n_outputs: int) -> list[SamplerOutput]:
        """The vector, or vectors, of each of the plan's outputs, from the last decode."""
        if self._each_token:
            vectors = self._context.token_embeddings(n_outputs)
            ends = itertools.accumulate(n for _, n in plan.chunks)
            return [_output(vectors[end - n : end]) for (_, n), end in zip(plan.chunks, ends, strict=True)]
        return [_output(self._context.embedding(sequence.seq_id)) for sequence in plan.outputs()]

    def close(self) -> None:
        """Does nothing: there are no threads."""


def _output(vector: npt.NDArray[np.float32]) -> SamplerOutput:
    if not np.isfinite(vector).all():
        return SamplerOutput(error="the model's vector contains infinite or NaN values")
    return SamplerOutput(embedding=vector.astype("<f4", copy=False).tobytes())
