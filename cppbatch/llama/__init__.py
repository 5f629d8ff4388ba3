"""Typed wrappers over llama.cpp. The only package that imports `llama_cpp`.

Arguments are checked here, because a failed assertion in C would abort the process: a value out of range raises
`cppbatch.errors.OutOfRange`.
"""

from cppbatch.llama.backend import Backend, Device
from cppbatch.llama.backend_sampling import BackendSampling
from cppbatch.llama.builtin_chat_templates import apply_builtin_template, builtin_template_names
from cppbatch.llama.context import Context
from cppbatch.llama.determinism import MIN_ROWS, least_rows_for_equal_bits
from cppbatch.llama.head_context import HeadBatch, HeadContext
from cppbatch.llama.library import why_no_heads, why_no_layer_rows
from cppbatch.llama.llama_batch import Batch, EmbeddingBatch
from cppbatch.llama.media_encoder import ImageSizes, MediaChunk, MediaEncoder
from cppbatch.llama.model import Model
from cppbatch.llama.placement import cpu_overrides, media_device
from cppbatch.llama.probes import find_prefix_sharing, probe_prefix_sharing
from cppbatch.llama.row_contexts import AssistantContext, DFlashContext, EagleContext, RowBatch
from cppbatch.llama.rpc import RpcConnections
from cppbatch.llama.sampler_chain import DrySampler, SamplerChain
from cppbatch.llama.sequence_state import SequenceState
from cppbatch.llama.vocab import Vocab

__all__ = [
    "MIN_ROWS",
    "AssistantContext",
    "Backend",
    "BackendSampling",
    "Batch",
    "Context",
    "DFlashContext",
    "Device",
    "DrySampler",
    "EagleContext",
    "EmbeddingBatch",
    "HeadBatch",
    "HeadContext",
    "ImageSizes",
    "MediaChunk",
    "MediaEncoder",
    "Model",
    "RowBatch",
    "RpcConnections",
    "SamplerChain",
    "SequenceState",
    "Vocab",
    "apply_builtin_template",
    "builtin_template_names",
    "cpu_overrides",
    "find_prefix_sharing",
    "least_rows_for_equal_bits",
    "media_device",
    "probe_prefix_sharing",
    "why_no_heads",
    "why_no_layer_rows",
]
