"""The child process of `estimate_memory`.

It creates each engine's model and context with simulated allocations and reads the sizes from llama.cpp's log.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import psutil
from msgspec.structs import replace

from cppbatch.config import MEDIA_SETTINGS, PLACEMENT, EngineConfig
from cppbatch.engine.kv.layout import CELL_STEP
from cppbatch.engine.runtime import (
    load_model,
    make_context,
    may_draft,
    open_encoder,
    repacks,
    samples_on_device,
    switches,
)
from cppbatch.engine.speculation.row_proposer import most_rows
from cppbatch.engine.speculation.runtimes import (
    check_draft_model,
    check_vocabulary,
    choose_row_draft,
    draft_config,
    make_draft_context,
    make_head_context,
    make_row_context,
    uses_head,
)
from cppbatch.engine.speculation.speculator import max_draft_rows
from cppbatch.errors import CppBatchError
from cppbatch.llama import Backend, Context, HeadContext, Model, RpcConnections
from cppbatch.llama.backend_sampling import device_sampling
from cppbatch.models.draft_files import DraftFile
from cppbatch.models.file_header import read_header
from cppbatch.models.find import model_parts
from cppbatch.rpc_endpoint import parse_endpoint
from cppbatch.sizing.buffers import MAPPED, Buffer, Owner, read_buffers, weight_buffers
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate, read_sequence_memory

_MAX_REAL_CELLS = 1 << 20  # llama.cpp's cell metadata is allocated for real: 50 bytes each
_MAX_REAL_STATE_BYTES = 256 << 20  # recurrent states are allocated for real too
_IN_ATTENTION = re.compile(r"\.attn_(v_b|sinks)\.")
_NO_FLASH = re.compile(r"Flash Attention not supported, set to disabled")


def main() -> None:
    """Reads a list of `EngineConfig` from stdin and writes a `MemoryEstimate` to stdout."""
    configs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[EngineConfig])
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(estimate(configs)))


def estimate(configs: list[EngineConfig]) -> MemoryEstimate:
    """The footprints of engines with these settings, and the devices."""
    connections = connect(configs)
    found = devices(configs[0])  # before models are loaded
    answer = MemoryEstimate(list(footprints(configs)), found)
    connections.close()
    return answer


def connect(configs: list[EngineConfig]) -> RpcConnections:
    """Connections to the RPC workers of all engines; none if that fails, which loading will report."""
    endpoints = dict.fromkeys(parse_endpoint(each) for config in configs for each in config.rpc)
    Backend.get()  # loads the RPC backend of a portable build
    try:
        return RpcConnections(list(endpoints))
    except CppBatchError:
        return RpcConnections([])


def devices(config: EngineConfig) -> list[Device]:
    """The devices of RPC workers that are connected, and the GPUs: llama.cpp's order, unless the settings name them."""
    found = [*_devices("remote"), *_devices("GPU")]
    return sorted(found, key=lambda device: _rank(device, config.device_names))


def _devices(kind: str) -> Iterator[Device]:
    """The devices of a kind, with their current free memory."""
    counts: Counter[str] = Counter()
    for device in Backend.get().devices():
        if kind not in device.kind:
            continue
        free, total, description = device.memory_free, device.memory_total, device.description
        if kind == "remote":  # described by its address; a buffer's name has the number of the device there
            buffer_types = device.name, f"RPC{counts[description]}[{description}]"
            counts[description] += 1
            yield Device(f"{description} ({device.name})", "", free, total, buffer_types)
        else:
            yield Device(device.name, description, free, total)


def _rank(device: Device, names: Sequence[str]) -> int:
    """The place of a device among those that the settings name; the others come last."""
    its = (device.name, *device.buffer_types)
    return next((i for i, name in enumerate(names) if name.partition(" ")[0] in its), len(names))


def footprints(configs: list[EngineConfig]) -> Iterator[Footprint]:
    """Yields footprints in order. Consecutive settings with the same model share one load."""
    simulated: _SimulatedModel | None = None
    try:
        for config in configs:
            draft = draft_config(config)
            try:
                has_head = uses_head(config)
                of_draft = draft and (draft.model_path, repacks(draft), _placement(draft))
                where = _placement(config)
                media = tuple(getattr(config, name) for name in MEDIA_SETTINGS)
                of_model = (config.model_path, where, repacks(config), config.lora, repr(config.model_changes))
                key = (*of_model, of_draft, media, has_head)
                if simulated is None or simulated.key != key:
                    if simulated:
                        simulated.close()
                    simulated = None
                    simulated = _SimulatedModel(config, key)
                yield simulated.footprint(config)
            except CppBatchError as error:
                yield Footprint(error=str(error))
    finally:
        if simulated:
            simulated.close()


def _placement(config: EngineConfig) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in (*PLACEMENT, "kv_offload", "op_offload", "deterministic"))


class _SimulatedModel:
    """A model, and the draft model if there is one, loaded with simulated allocations."""

    def __init__(self, config: EngineConfig, key: tuple[object, ...]) -> None:
        self.key = key
        self._draft: Model | None = None
        self._row_draft: DraftFile | None = None
        self.model, weights = _load(config)
        draft_weights: list[Buffer] = []
        try:
            if draft := draft_config(config):
                self._row_draft, is_left_out = choose_row_draft(config)
                if not is_left_out:
                    self._draft, draft_weights = _load(draft)
                    (check_vocabulary if self._row_draft else check_draft_model)(self._draft, self.model)
            projector = _projector(config, self.model) if config.mmproj else []
        except BaseException:
            self.close()
            raise
        names = (tensor.name for part in model_parts(self.model.path) for tensor in read_header(part).tensors)
        self._attends_with_weights = any(map(_IN_ATTENTION.search, names))  # attention is where they are
        process = Buffer("process", "CPU", psutil.Process().memory_info().rss)
        self._fixed = [*weights, *_of(draft_weights, "draft model"), *projector, process]

    def close(self) -> None:
        self.model.close()
        if self._draft:
            self._draft.close()

    def footprint(self, config: EngineConfig) -> Footprint:
        """The larger one, of an engine that switches its layout. Raises the exceptions of creating a context."""
        first = self._footprint(config)
        if not switches(config, self.model):
            return first
        unified = self._footprint(replace(config, kv_layout="unified"))
        larger = max(first, unified, key=lambda each: sum(buffer.n_bytes for buffer in each.buffers))
        return replace(larger, kv_layout="auto", sequence_cells=unified.sequence_cells)

    def _footprint(self, config: EngineConfig) -> Footprint:
        model = self.model
        n_ctx = min(config.n_ctx, _MAX_REAL_CELLS)
        n_parallel = min(config.n_parallel, self._max_real_states(config)) if model.is_recurrent else config.n_parallel
        smaller = replace(config, n_ctx=n_ctx, n_parallel=n_parallel)
        factors = {
            "cells": config.n_ctx / n_ctx,
            "compute": config.n_ctx / n_ctx,
            "states": config.n_parallel / n_parallel,
            "output": config.n_parallel / n_parallel,
        }
        of_draft: list[Buffer] = []
        if self._row_draft and self._draft and (draft := draft_config(smaller)):
            with (
                make_context(smaller, model) as target,
                Backend.get().lines() as lines,
                make_row_context(draft, self._row_draft, self._draft, target) as reader,
            ):
                more = [*_hidden_rows(config, reader), _more_logits(reader)]
                of_draft = _of([*_context_buffers(lines, factors), *more], "draft model")
        elif self._draft and (draft := draft_config(smaller)):
            with Backend.get().lines() as lines, make_draft_context(draft, self._draft):
                of_draft = _of(_context_buffers(lines, factors), "draft model")
        if model.has_head:
            for i in range(model.n_draft_heads):
                with Backend.get().lines() as lines, make_head_context(smaller, model, i) as head:
                    more = [] if i else [*_hidden_rows(config, head), _more_logits(head)]
                    of_draft += _of([*_context_buffers(lines, factors), *more], "draft head")
        with self._sampling(smaller), Backend.get().lines() as lines, make_context(smaller, model) as context:
            buffers = [*_context_buffers(lines, factors), *_output_rows(config, model, context)]
            found = Footprint(
                kv_layout="unified" if context.kv_unified else "per-sequence",
                sequence_cells=round(context.n_ctx_seq * config.n_ctx / n_ctx),
                n_layers=model.n_layers,
                n_ctx_train=model.n_ctx_train,
                sequence=read_sequence_memory(lines, window=model.n_swa, n_sequences=context.n_seq_max),
            )
        computes_scores = context.flash_attn == "off" or any(map(_NO_FLASH.search, lines))
        if not config.kv_offload and computes_scores and not self._attends_with_weights:
            buffers = self._with_attention_on_host(smaller, buffers)
        return replace(found, buffers=[*self._fixed, *buffers, *of_draft])

    def _sampling(self, config: EngineConfig) -> AbstractContextManager[None]:
        """Lets contexts reserve what top-k on the device takes, where the engine's context will."""
        if not samples_on_device(config, self.model):
            return nullcontext()
        return device_sampling(self.model.context_params, config.n_parallel, self.model.vocab.n_tokens)

    def _with_attention_on_host(self, config: EngineConfig, buffers: list[Buffer]) -> list[Buffer]:
        """Buffers of an engine whose cells are on the host, where attention without flash attention is computed.

        A simulated reservation counts it on the devices, because `ggml_backend_sched_reserve_size` forgets where the
        graph has put it. It is what they need beyond a context that computes no scores of whole rows of cells.
        """
        n_streams = 1 if config.kv_layout == "unified" else config.n_parallel
        cells = min(config.n_ctx, max(config.n_ubatch, config.n_parallel, CELL_STEP * n_streams))
        without = replace(config, n_ctx=cells, flash_attn="on")
        with self._sampling(without), Backend.get().lines() as lines, make_context(without, self.model):
            needed = {each.buffer_type: each.n_bytes for each in read_buffers(lines) if each.kind == "compute"}
        found, moved, on_host = list[Buffer](), 0, 0
        for each in buffers:
            if each.kind != "compute":
                found.append(each)
            elif each.buffer_type.startswith("CPU"):
                on_host += each.n_bytes
            else:
                n_bytes = min(each.n_bytes, needed.get(each.buffer_type, each.n_bytes))
                moved = max(moved, each.n_bytes - n_bytes)
                found.append(replace(each, n_bytes=n_bytes))
        # layers on the CPU have attention there already
        return [*found, Buffer("compute", "CPU", max(on_host, needed.get("CPU", 0) + moved))]

    def _max_real_states(self, config: EngineConfig) -> int:
        """Returns the number of sequences whose states fit into `_MAX_REAL_STATE_BYTES`."""
        with Backend.get().lines() as lines, make_context(replace(config, n_ctx=256, n_parallel=1), self.model):
            bytes_per_sequence = sum(buffer.n_bytes for buffer in read_buffers(lines) if buffer.kind == "states")
        return max(1, _MAX_REAL_STATE_BYTES // max(1, bytes_per_sequence))


def _load(config: EngineConfig) -> tuple[Model, list[Buffer]]:
    """A model with simulated allocations, and the buffers of its weights."""
    with Backend.get().lines() as lines:
        model = load_model(config, no_alloc=True)
    tensors = [read_header(part).tensors for part in model_parts(model.path)]
    buffers = weight_buffers(lines, tensors, names_all=not (config.rpc or Backend.get().supports_gpu))
    if config.load_mode not in ("auto", "mmap"):  # copied, or locked in memory
        buffers = [replace(each, buffer_type="CPU") if each.buffer_type == MAPPED else each for each in buffers]
    return model, buffers


def _projector(config: EngineConfig, model: Model) -> list[Buffer]:
    """The weights and buffers of the projector, which is loaded for it: mtmd has no simulated allocations in C."""
    with Backend.get().lines() as lines:
        open_encoder(config, model, n_threads=1).close()
    encoding = [buffer for buffer in read_buffers(lines) if buffer.kind == "encoding"]
    place = next((buffer.buffer_type for buffer in encoding if buffer.buffer_type != "CPU"), "CPU")
    n_bytes = sum(tensor.n_bytes for tensor in read_header(Path(config.mmproj)).tensors)
    of_steps = Buffer("vectors", "CPU", config.n_batch * model.n_embd_inp * 4)
    return [Buffer("projector", place, n_bytes), *encoding, of_steps]


def _context_buffers(lines: list[str], factors: dict[str, float]) -> list[Buffer]:
    """The buffers in the log of creating a context, multiplied by the factor of their kind."""
    return [_scale(each, factors.get(each.kind, 1.0)) for each in read_buffers(lines) if each.kind != "weights"]


def _of(buffers: list[Buffer], owner: Owner) -> list[Buffer]:
    return [replace(buffer, owner=owner) for buffer in buffers]


def _more_logits(reader: HeadContext) -> Buffer:
    """The rows of logits for which llama.cpp reserves no memory yet."""
    n = max(0, reader.n_logits - reader.n_seq_max)
    return Buffer("output", "CPU", n * reader.model.vocab.n_tokens * 4)


def _hidden_rows(config: EngineConfig, head: HeadContext) -> Iterator[Buffer]:
    """Rows of every token of a ubatch and a batch, of the model and of the head, and those that are kept for
    sequences."""
    n_rows = (
        config.n_ubatch + config.n_batch + head.n_batch + config.n_parallel * most_rows(config.n_parallel, head.n_row)
    )
    yield Buffer("hidden", "CPU", n_rows * head.n_row * 4)


def _scale(buffer: Buffer, factor: float) -> Buffer:
    return replace(buffer, n_bytes=round(buffer.n_bytes * factor))


def _output_rows(config: EngineConfig, model: Model, context: Context) -> Iterator[Buffer]:
    """Yields buffers allocated in the first steps: llama.cpp's rows of logits, and the engine's copies."""
    row = model.vocab.n_tokens * 4
    if context.is_pooled:  # llama.cpp computes logits of every token
        yield Buffer("output", "CPU", (context.n_batch - context.n_seq_max) * (row + model.n_embd * 4))
        return
    on_device = model.on_gpu and config.sampling != "host"
    if on_device:  # candidates, logits and probabilities: a row each
        yield Buffer("output", "CPU", 3 * config.n_parallel * row)
    yield Buffer("engine", "CPU", config.n_parallel * row)
    if may_draft(config, model) and (not model.is_recurrent or model.most_snapshots):
        n_drafted = min(
            config.n_ubatch, config.n_parallel * (1 + config.draft_max), max_draft_rows(model.vocab.n_tokens)
        )
        yield Buffer("drafts", "CPU", max(0, n_drafted - config.n_parallel) * row)


if __name__ == "__main__":
    main()
