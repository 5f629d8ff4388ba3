"""Typed wrappers over llama.cpp. The only package that imports `llama_cpp`.

Nothing here lets a bad argument reach an assertion in C, which would abort the process: ranges are checked first and
raise `cppbatch.errors.OutOfRange`.
"""

from cppbatch.llama.backend import Backend, Device
from cppbatch.llama.batch import Batch
from cppbatch.llama.candidates import DeviceCandidates, find_candidates_on_device
from cppbatch.llama.context import Context, SequenceState
from cppbatch.llama.model import Model
from cppbatch.llama.sampler import DrySampler, SamplerChain
from cppbatch.llama.sharing import find_sharing
from cppbatch.llama.vocab import Vocab

__all__ = [
    "Backend",
    "Batch",
    "Context",
    "Device",
    "DeviceCandidates",
    "DrySampler",
    "Model",
    "SamplerChain",
    "SequenceState",
    "Vocab",
    "find_candidates_on_device",
    "find_sharing",
]
