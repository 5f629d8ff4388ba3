"""From a computed step to vectors: what `Sampler` is for text."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling import SamplerOutput
from cppbatch.engine.scheduler import StepPlan


class Vectors(Protocol):
    """The part of a context that gives vectors (`cppbatch.llama.Context`)."""

    def embedding(self, seq_id: int) -> npt.NDArray[np.float32]: ...


class Pooler:
    """Reads the vector of each sequence that the step has computed."""

    def __init__(self, context: Vectors) -> None:
        self._context = context

    def prepare(self, plan: StepPlan) -> None:
        """Nothing: every token of an embedding sequence counts as an output anyway."""

    def sample(self, plan: StepPlan, n_outputs: int) -> list[SamplerOutput]:
        """A vector for each of the plan's outputs, from the last decode."""
        return [_choice(self._context.embedding(sequence.seq_id)) for sequence in plan.outputs()]

    def close(self) -> None:
        """Nothing is left running."""


def _choice(vector: npt.NDArray[np.float32]) -> SamplerOutput:
    if not np.isfinite(vector).all():
        return SamplerOutput(error="the model made a vector with numbers that are infinite or none (NaN) of it")
    return SamplerOutput(embedding=vector.astype("<f4", copy=False).tobytes())
