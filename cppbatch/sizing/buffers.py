"""The sizes of llama.cpp's buffers, from its log, and of the weights in each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, Protocol

import msgspec

Kind = Literal[
    "weights", "adapters", "cells", "states", "compute", "output", "projector", "encoding", "vectors", "process",
    "engine", "drafts", "hidden",
]  # fmt: skip
"""cells: the KV cache. states: the state of recurrent layers. output: rows of logits or embeddings. projector: the
weights of an mmproj file. encoding: the compute buffers of its encoders. vectors: the batch of their output. process:
the interpreter, libraries and vocabulary. engine: the engine's copies of output rows. hidden: rows for a draft head or
model."""
Owner = Literal["", "draft model", "draft head"]
"""Owners of buffers other than the model itself."""


class Buffer(msgspec.Struct, frozen=True):
    """An allocation."""

    kind: Kind
    buffer_type: str
    """llama.cpp's buffer type: CPU, CPU_Mapped, CPU_REPACK, CUDA0, CUDA_Host ..."""
    n_bytes: int
    owner: Owner = ""


_KINDS: dict[str, Kind] = {"model": "weights", "LoRA": "adapters", "compute": "compute", "output": "output"}
_SIZE = re.compile(r"(\S+)\s+(model|LoRA|KV|RS|DSV4 \S+ state|compute|output) buffer size =\s*([\d.]+) MiB")
_CACHE = re.compile(r"size =\s*([\d.]+) MiB \(\s*\d+ cells,.* K \(")
_CACHE_LAYER = re.compile(r"layer\s+\d+: dev = (\S+)")
_ENCODER = "reserve_compute_meta: "  # the function of mtmd that logs it
_LOADING = re.compile(r"llama_model_loader: loaded meta data with")
_CONTEXT = re.compile(r"constructing llama_context")


def read_buffers(lines: Iterable[str]) -> list[Buffer]:
    """Returns the buffers in the log of loading a model or creating a context, one for each kind and buffer type.

    Buffers of a simulated KV cache have size 0. Then the total that llama.cpp logs is divided among the devices by
    their number of layers.
    """
    sizes: Counter[tuple[Kind, str]] = Counter()
    cache: Counter[str] = Counter()  # of the cache whose total was not logged yet
    layers: Counter[str] = Counter()
    for line in lines:
        if "sched_reserve: reserving ..." in line:  # reserved again: replaces the earlier reservation
            sizes = Counter({key: n for key, n in sizes.items() if key[0] != "compute"})
        elif found := _CACHE_LAYER.search(line):
            layers[found[1]] += 1
        elif (found := _SIZE.search(line)) and found[2] == "KV":
            cache[found[1]] += _bytes(found[3])
        elif found and _ENCODER in line:
            sizes["encoding", found[1]] += _bytes(found[3])
        elif found:
            sizes[_KINDS.get(found[2], "states"), found[1]] += _bytes(found[3])
        elif found := _CACHE.search(line):
            total = _bytes(found[1])
            shares = cache if cache.total() else {place: total * n // layers.total() for place, n in layers.items()}
            sizes.update({("cells", place): n for place, n in shares.items()})
            layers, cache = Counter(), Counter()
    return [Buffer(kind, place, n) for (kind, place), n in sizes.items() if n]


def read_engine_buffers(lines: Sequence[str]) -> list[Buffer]:
    """Returns the buffers of an engine. A draft model is loaded after its model and context; a draft head's context is
    made then."""
    loads, contexts = ([i for i, line in enumerate(lines) if form.search(line)] for form in (_LOADING, _CONTEXT))
    owner: Owner = "draft model" if len(loads) > 1 else "draft head"
    of_drafts = loads[1:2] if len(loads) > 1 else contexts[1:]
    own, *drafts = [lines[a:b] for a, b in pairwise([0, *of_drafts, len(lines)])]
    of_draft = (msgspec.structs.replace(each, owner=owner) for part in drafts for each in read_buffers(part))
    return [*read_buffers(own), *of_draft]


def _bytes(mib: str) -> int:
    return round(float(mib) * 2**20)


_PLACED = re.compile(r"tensor (\S+) \(\d+ MiB \S+\) buffer type overridden to (\S+)")
_LAYER = re.compile(r"layer\s+(\d+) assigned to device (\S+),")
_OF_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_INPUT = re.compile(r"token_(?!embd_norm)|position_embd|per_layer_token")  # always on the CPU
MAPPED = "CPU_Mapped"
"""The buffer type of weights that are mapped from the file."""
_AMX_BYTES = {"Q8_0": 4, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}
"""Bytes of a block that weights packed for AMX take beyond the file's (ggml-cpu `amx/mmq.cpp`, `get_tile_size`)."""


class TensorInfo(Protocol):
    """A tensor in a GGUF file (`cppbatch.models.file_header.TensorInfo`)."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def n_blocks(self) -> int: ...


def weight_buffers(
    lines: Sequence[str], parts: Iterable[Sequence[TensorInfo]], *, names_all: bool = False
) -> list[Buffer]:
    """Returns the buffers of the weights, from the log of a simulated load and the tensors of each model file.

    In each file the range from the first to the last mapped tensor is mapped. `names_all`: the log has the place of
    every tensor, as where the CPU is the only device; tensors that llama.cpp does not load do not count then.
    """
    placed: dict[str, set[str]] = {}
    layers: dict[int, str] = {}
    for line in lines:
        if found := _PLACED.search(line):
            placed.setdefault(found[1], set()).add(_place(found[2]))
        elif found := _LAYER.search(line):
            layers[int(found[1])] = _place(found[2])
    files = [list(tensors) for tensors in parts]
    has_output = any(tensor.name == "output.weight" for tensors in files for tensor in tensors)
    sizes: Counter[str] = Counter()
    for tensors in files:
        mapped: list[TensorInfo] = []
        for tensor in tensors:
            its = placed.get(tensor.name, set())
            for place in its if its or names_all else _by_layer(tensor.name, layers, has_output):
                if place == MAPPED:
                    mapped.append(tensor)
                else:
                    sizes[place] += tensor.n_bytes
                    if place == "AMX":
                        sizes[place] += _AMX_BYTES.get(tensor.kind, 0) * tensor.n_blocks
        if mapped:
            sizes[MAPPED] += max(t.offset + t.n_bytes for t in mapped) - min(t.offset for t in mapped)
    return [Buffer("weights", place, n) for place, n in sizes.items()]


def _by_layer(name: str, layers: dict[int, str], has_output: bool) -> set[str]:
    of_output = layers[max(layers)] if layers else MAPPED  # llama.cpp counts the output as one more layer
    if of_layer := _OF_LAYER.match(name):
        return {layers.get(int(of_layer[1]), MAPPED)}
    if name == "token_embd.weight" and not has_output:  # tied embeddings: also used as the output
        return {MAPPED, of_output}
    return {MAPPED if _OF_INPUT.match(name) else of_output}


def _place(name: str) -> str:
    """Host buffers that a GPU can read become mapped, since the files are mapped."""
    return MAPPED if name == "CPU" or name.endswith("_Host") else name
