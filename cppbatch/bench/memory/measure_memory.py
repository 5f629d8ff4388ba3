"""Measuring the memory of a loaded engine after its first steps."""

from __future__ import annotations

import msgspec
import psutil

from cppbatch.bench.memory.buffers import Buffer, read_engine_buffers
from cppbatch.config import EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.runtime import load_runtime
from cppbatch.llama import Backend

_NEW_TOKENS = 4


class MeasuredMemory(msgspec.Struct, frozen=True):
    """Measured memory in bytes."""

    buffers: list[Buffer]
    """As llama.cpp logged them."""
    process: int
    """Growth of the process's resident memory, without pages that were never written."""
    devices: dict[str, int]
    """Decrease of free memory, by device."""


def measure_memory(config: EngineConfig) -> MeasuredMemory:
    """Loads the model and runs every sequence, so that the memory is resident, not only allocated."""
    backend, process = Backend.get(), psutil.Process()
    free_before, resident_before = _free(backend), process.memory_info().rss
    with backend.lines() as lines:
        runtime = load_runtime(config)
    with BatchInferenceEngine(config, runtime=runtime) as engine:
        info = engine.info
        n_prompt = max(1, min(-(-config.n_ubatch // config.n_parallel), info.max_sequence - _NEW_TOKENS))
        most = info.n_vocab - 1
        prompts = [[(7 * i + 3 * k) % most + 1 for k in range(n_prompt)] for i in range(config.n_parallel)]
        if info.pooling:
            engine.embed(prompts)
        else:
            engine.generate(prompts, SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, temperature=0))
        return MeasuredMemory(
            read_engine_buffers(lines),
            process.memory_info().rss - resident_before,
            {name: free_before[name] - free for name, free in _free(backend).items()},
        )


def _free(backend: Backend) -> dict[str, int]:
    return {device.name: device.memory_free for device in backend.devices() if "GPU" in device.kind}
