"""Continuous batching for GGUF models on your own machine, over llama.cpp.

from cppbatch import BatchInferenceEngine, SamplingParams

with BatchInferenceEngine("model.gguf") as engine:
    for result in engine.chat(["Why is the sky blue?", "What is a lighthouse?"], SamplingParams(max_tokens=64)):
        print(result.text)
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers know it: importing `typing` takes 10 ms, in which Ctrl-C prints a traceback
if TYPE_CHECKING:
    from typing import Any

    from cppbatch.chat.media_parts import PlainText
    from cppbatch.cluster.engines.local import LocalEngine
    from cppbatch.cluster.engines.process import EngineProcess
    from cppbatch.config import EngineConfig
    from cppbatch.engine.chat_results import ChatCompletion, ChatEvent, ChatStream
    from cppbatch.engine.engine import BatchInferenceEngine, generate_batch
    from cppbatch.engine.params import SamplingParams
    from cppbatch.engine.request import (
        Completion,
        FinishReason,
        GenerationEvent,
        GenerationRequest,
        Mapped,
        Media,
        MediaPrompt,
        Pair,
        TokenLogprob,
    )
    from cppbatch.errors import CppBatchError, InvalidRequest
    from cppbatch.llama_cpp_python.llama import Llama
    from cppbatch.llama_cpp_python.patching import patch
    from cppbatch.models.pull import pull_default

    __version__: str

# Imported on first use: `cppbatch --help` and a server process do not need llama.cpp; workers load the model.
_MODULES = {
    "EngineProcess": "cppbatch.cluster.engines.process",
    "LocalEngine": "cppbatch.cluster.engines.local",
    "EngineConfig": "cppbatch.config",
    "BatchInferenceEngine": "cppbatch.engine.engine",
    "generate_batch": "cppbatch.engine.engine",
    "ChatCompletion": "cppbatch.engine.chat_results",
    "ChatEvent": "cppbatch.engine.chat_results",
    "ChatStream": "cppbatch.engine.chat_results",
    "Completion": "cppbatch.engine.request",
    "FinishReason": "cppbatch.engine.request",
    "GenerationEvent": "cppbatch.engine.request",
    "GenerationRequest": "cppbatch.engine.request",
    "Mapped": "cppbatch.engine.request",
    "Media": "cppbatch.engine.request",
    "MediaPrompt": "cppbatch.engine.request",
    "Pair": "cppbatch.engine.request",
    "PlainText": "cppbatch.chat.media_parts",
    "SamplingParams": "cppbatch.engine.params",
    "TokenLogprob": "cppbatch.engine.request",
    "CppBatchError": "cppbatch.errors",
    "InvalidRequest": "cppbatch.errors",
    "Llama": "cppbatch.llama_cpp_python.llama",
    "patch": "cppbatch.llama_cpp_python.patching",
    "pull_default": "cppbatch.models.pull",
}

__all__ = [
    "BatchInferenceEngine",
    "ChatCompletion",
    "ChatEvent",
    "ChatStream",
    "Completion",
    "CppBatchError",
    "EngineConfig",
    "EngineProcess",
    "FinishReason",
    "GenerationEvent",
    "GenerationRequest",
    "InvalidRequest",
    "Llama",
    "LocalEngine",
    "Mapped",
    "Media",
    "MediaPrompt",
    "Pair",
    "PlainText",
    "SamplingParams",
    "TokenLogprob",
    "__version__",
    "generate_batch",
    "patch",
    "pull_default",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("cppbatch")
    if name not in _MODULES:
        raise AttributeError(f"module 'cppbatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
