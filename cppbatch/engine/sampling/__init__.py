"""Converts the logits of a step to one token per sequence."""

from cppbatch.engine.sampling.sampler import Sampler, SamplerOutput

__all__ = ["Sampler", "SamplerOutput"]
