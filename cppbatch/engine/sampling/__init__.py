"""From rows of logits to tokens, for a whole batch at once."""

from cppbatch.engine.sampling.logprobs import PromptScorer
from cppbatch.engine.sampling.sampler import Choice, Sampler

__all__ = ["Choice", "PromptScorer", "Sampler"]
