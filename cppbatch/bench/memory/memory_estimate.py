"""Asks llama.cpp, in a child process, what engines would take: it simulates its allocations there, and may crash."""

from __future__ import annotations

import subprocess

import msgspec

from cppbatch.bench.child_process import run_module
from cppbatch.bench.memory.buffers import Buffer
from cppbatch.config import EngineConfig
from cppbatch.errors import EstimateFailed

_TIMEOUT_S = 60  # the default model takes 0.3 s; a large file on a slow disk has its header read


class Device(msgspec.Struct, frozen=True):
    """A GPU, as llama.cpp names it. Memory in bytes; both 0 where the driver does not tell."""

    name: str
    description: str
    free: int
    total: int


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine would take, or why it cannot be made."""

    buffers: list[Buffer] = []
    kv_layout: str = ""
    sequence_cells: int = 0
    """KV cells that one sequence may take."""
    n_layers: int = 0
    n_ctx_train: int = 0
    error: str | None = None


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Footprints in the order of the settings that were asked for, and where they would be."""

    footprints: list[Footprint]
    devices: list[Device]
    """GPUs; what they have free is what they had while the child used none of it but what a process takes there."""


def estimate_memory(configs: list[EngineConfig]) -> MemoryEstimate:
    """What each of these engines would take by itself. Allocates next to nothing, and takes 0.3 s and more.

    Raises `EstimateFailed` when the child process does not answer.
    """
    unique = list(dict.fromkeys(configs))
    try:
        done = run_module("cppbatch.bench.memory.memory_estimate_child", msgspec.json.encode(unique), _TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise EstimateFailed(f"llama.cpp has not said in {_TIMEOUT_S} s what it would allocate") from None
    except OSError as error:
        raise EstimateFailed(f"a process to ask llama.cpp in cannot be started: {error}") from error
    try:
        answer = msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=MemoryEstimate)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it says nothing"]
        raise EstimateFailed(
            f"the process that asks llama.cpp what it would allocate ended with code {done.returncode}: {last[0]}"
        ) from None
    by_config = dict(zip(unique, answer.footprints, strict=True))
    return MemoryEstimate([by_config[config] for config in configs], answer.devices)
