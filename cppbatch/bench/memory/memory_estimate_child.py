"""The child process of `survey`: makes each engine's model and context with simulated allocations; reads the log."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import psutil
from msgspec.structs import replace

from cppbatch.bench.memory.buffers import Buffer, read_buffers
from cppbatch.bench.memory.memory_estimate import Device, Footprint, MemoryEstimate
from cppbatch.bench.memory.weights import weight_buffers
from cppbatch.config import EngineConfig
from cppbatch.engine.runtime import load_model, make_context
from cppbatch.errors import CppBatchError
from cppbatch.llama import Backend, Context, Model
from cppbatch.llama.gguf_header import list_tensors
from cppbatch.models.find import model_parts

_MOST_CELLS = 1 << 20  # llama.cpp's books of cells are real even so: 50 bytes each
_MOST_STATE_BYTES = 256 << 20  # and so are recurrent states
_FLOAT = 4


def main() -> None:
    """Reads a list of `EngineConfig` from the standard input, writes a `MemoryEstimate` to the standard output."""
    configs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[EngineConfig])
    devices = [
        Device(device.name, device.description, device.memory_free, device.memory_total)
        for device in Backend.get().devices()
        if "GPU" in device.kind
    ]
    answer = MemoryEstimate(list(footprints(configs)), devices)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer))


def footprints(configs: list[EngineConfig]) -> Iterator[Footprint]:
    """In their order. Each model is opened once, if those that share it stand together."""
    opened: _Opened | None = None
    try:
        for config in configs:
            key = (config.model_path, config.n_gpu_layers, config.device, config.lora)
            try:
                if opened is None or opened.key != key:
                    if opened:
                        opened.model.close()
                    opened = None
                    opened = _Opened(config, key)
                yield opened.footprint(config)
            except CppBatchError as error:
                yield Footprint(error=str(error))
    finally:
        if opened:
            opened.model.close()


class _Opened:
    """A simulated model."""

    def __init__(self, config: EngineConfig, key: tuple[object, ...]) -> None:
        self.key = key
        with Backend.get().lines() as lines:
            self.model = load_model(config, no_alloc=True)
        parts = [list_tensors(part) for part in model_parts(self.model.path)]
        self._fixed = [*weight_buffers(lines, parts), Buffer("process", "CPU", psutil.Process().memory_info().rss)]

    def footprint(self, config: EngineConfig) -> Footprint:
        """Raises what making a context raises."""
        model = self.model
        n_ctx = min(config.n_ctx, _MOST_CELLS)
        n_parallel = min(config.n_parallel, self._most_states(config)) if model.is_recurrent else config.n_parallel
        smaller = replace(config, n_ctx=n_ctx, n_parallel=n_parallel)
        with Backend.get().lines() as lines, make_context(smaller, model) as context:
            factors = {
                "cells": config.n_ctx / n_ctx,
                "compute": config.n_ctx / n_ctx,
                "states": config.n_parallel / n_parallel,
                "output": config.n_parallel / n_parallel,
            }
            buffers = [
                _scaled(each, factors.get(each.kind, 1.0)) for each in read_buffers(lines) if each.kind != "weights"
            ]
            return Footprint(
                buffers=[*self._fixed, *buffers, *_rows(config, model, context)],
                kv_layout="unified" if context.kv_unified else "per-sequence",
                sequence_cells=round(context.n_ctx_seq * config.n_ctx / n_ctx),
                n_layers=model.n_layers,
                n_ctx_train=model.n_ctx_train,
            )

    def _most_states(self, config: EngineConfig) -> int:
        """Sequences whose states may be made for real."""
        with Backend.get().lines() as lines, make_context(replace(config, n_ctx=256, n_parallel=1), self.model):
            of_one = sum(buffer.n_bytes for buffer in read_buffers(lines) if buffer.kind == "states")
        return max(1, _MOST_STATE_BYTES // max(1, of_one))


def _scaled(buffer: Buffer, factor: float) -> Buffer:
    return replace(buffer, n_bytes=round(buffer.n_bytes * factor))


def _rows(config: EngineConfig, model: Model, context: Context) -> Iterator[Buffer]:
    """What comes with the first steps: rows of logits that llama.cpp makes room for only then, and our copies."""
    row = model.vocab.n_tokens * _FLOAT
    if context.is_pooled:  # llama.cpp makes logits of every token
        yield Buffer("output", "CPU", (context.n_batch - context.n_seq_max) * (row + model.n_embd * _FLOAT))
        return
    on_device = config.n_gpu_layers != 0 and Backend.get().supports_gpu and config.sampling != "host"
    if on_device:  # candidates, their logits and probabilities have rooms as long as a row each
        yield Buffer("output", "CPU", 3 * config.n_parallel * row)
    yield Buffer("engine", "CPU", config.n_parallel * row)


if __name__ == "__main__":
    main()
