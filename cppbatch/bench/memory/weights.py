"""Buffer types of a model's tensors, and the memory that the weights take in each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from cppbatch.bench.memory.buffers import Buffer

_PLACED = re.compile(r"tensor (\S+) \(\d+ MiB \S+\) buffer type overridden to (\S+)")
_LAYER = re.compile(r"layer\s+(\d+) assigned to device (\S+),")
_OF_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_INPUT = re.compile(r"token_|position_embd|per_layer_token")  # always on the CPU, whatever the device of the layers
MAPPED = "CPU_Mapped"
"""The buffer type of weights that are mapped from the file."""


class TensorInfo(Protocol):
    """A tensor in a GGUF file (`cppbatch.llama.gguf_header.Tensor`)."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...


def weight_buffers(lines: Sequence[str], parts: Iterable[Sequence[TensorInfo]]) -> list[Buffer]:
    """Returns the buffers of the weights, from the log of a simulated load and the tensors of each model file.

    In each file the range from the first to the last mapped tensor is mapped. Tensors that llama.cpp does not load do
    not count.
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
            for place in placed.get(tensor.name, set()) if placed else _by_layer(tensor.name, layers, has_output):
                if place == MAPPED:
                    mapped.append(tensor)
                else:
                    sizes[place] += tensor.n_bytes
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
