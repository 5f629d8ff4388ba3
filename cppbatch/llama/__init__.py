"""Typed wrappers over llama.cpp. The only package that imports `llama_cpp`.

Nothing here lets a bad argument reach an assertion in C, which would abort the process: ranges are checked first and
raise `cppbatch.errors.OutOfRange`.
"""

from cppbatch.llama.backend import Backend, Device
from cppbatch.llama.backend_sampling import BackendSampling
from cppbatch.llama.context import Context
from cppbatch.llama.determinism import logits_are_independent
from cppbatch.llama.llama_batch import Batch
from cppbatch.llama.model import Model
from cppbatch.llama.prefix_sharing import probe_prefix_sharing
from cppbatch.llama.sampler_chain import DrySampler, SamplerChain
from cppbatch.llama.sequence_state import SequenceState
from cppbatch.llama.vocab import Vocab

__all__ = [
    "Backend",
    "BackendSampling",
    "Batch",
    "Context",
    "Device",
    "DrySampler",
    "Model",
    "SamplerChain",
    "SequenceState",
    "Vocab",
    "logits_are_independent",
    "probe_prefix_sharing",
]
