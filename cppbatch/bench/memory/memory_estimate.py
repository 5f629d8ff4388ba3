"""Estimating the memory of engines: a child process, which may crash, lets llama.cpp simulate its allocations."""

from __future__ import annotations

import subprocess

import msgspec

from cppbatch.bench.child_process import run_module
from cppbatch.bench.memory.buffers import Buffer
from cppbatch.bench.memory.sequence_memory import SequenceMemory
from cppbatch.config import EngineConfig
from cppbatch.errors import EstimateFailed

_TIMEOUT_S = 60  # the default model takes 0.3 s; reading the header of a large file from a slow disk takes longer


class Device(msgspec.Struct, frozen=True):
    """A GPU, or a device of an RPC worker. Memory in bytes, 0 if the driver does not report it."""

    name: str
    """llama.cpp's, of an RPC worker with its address."""
    description: str
    """Of an RPC worker's: empty."""
    free: int
    total: int
    buffer_types: tuple[str, ...] = ()
    """llama.cpp's names of its buffers, without a suffix that they have on Metal; (): its name."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one engine, or why the engine cannot be created."""

    buffers: list[Buffer] = []
    kv_layout: str = ""
    sequence_cells: int = 0
    """The most KV cells that one sequence may use."""
    n_layers: int = 0
    n_ctx_train: int = 0
    sequence: SequenceMemory = SequenceMemory()
    """What one sequence takes of the cells and states."""
    error: str | None = None


class MemoryEstimate(msgspec.Struct, frozen=True):
    """The footprints of several engines, and the devices."""

    footprints: list[Footprint]
    """In the order of the settings."""
    devices: list[Device]
    """GPUs, and devices of RPC workers. Free memory of GPUs is measured while the child process uses only what each
    process takes on a GPU."""


def estimate_memory(configs: list[EngineConfig]) -> MemoryEstimate:
    """Estimates the memory of each of these engines on its own. Allocates almost nothing; takes 0.3 s or more.

    Raises `EstimateFailed` if the child process fails.
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
