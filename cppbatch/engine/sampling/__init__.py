"""From rows of logits to tokens, for a whole batch at once."""

from cppbatch.engine.sampling.sampler_output import SamplerOutput
from cppbatch.engine.sampling.step import StepSampler

__all__ = ["SamplerOutput", "StepSampler"]
