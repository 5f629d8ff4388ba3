"""From rows of logits to tokens, for a whole batch at once."""

from cppbatch.engine.sampling.choice import Choice
from cppbatch.engine.sampling.step import StepSampler

__all__ = ["Choice", "StepSampler"]
