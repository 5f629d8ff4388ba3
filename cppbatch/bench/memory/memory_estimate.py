"""Estimating the memory of engines: a child process, which may crash, lets llama.cpp simulate its allocations."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec

from cppbatch.bench.child_process import run_module
from cppbatch.bench.memory.buffers import Buffer
from cppbatch.bench.memory.sequence_memory import SequenceMemory
from cppbatch.config import EngineConfig, available_threads
from cppbatch.errors import EstimateFailed
from cppbatch.findings import (
    build_key,
    computes_on_cpu_only,
    finding_key,
    finding_path,
    library_folder,
    read_finding,
    write_finding,
)
from cppbatch.models.find import model_parts
from cppbatch.models.kernels import times_path

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

    Footprints on the CPU are cached, with a key of all that they depend on. With a GPU or RPC workers llama.cpp is
    asked each time, and says what is free there. Raises `EstimateFailed` if the child process fails.
    """
    unique = list(dict.fromkeys(configs))
    paths = {config: path for config in unique if (path := _cached_at(config))}
    known = {config: each for config, path in paths.items() if (each := read_finding(path, Footprint))}
    if len(known) == len(unique):
        return MemoryEstimate([known[config] for config in configs], [])
    answer = _ask(unique)
    by_config = dict(zip(unique, answer.footprints, strict=True))
    for config, path in paths.items():
        if by_config[config].error is None and not answer.devices:
            write_finding(path, by_config[config])
    return MemoryEstimate([by_config[config] for config in configs], answer.devices)


def _cached_at(config: EngineConfig) -> Path | None:
    """The file for the footprint of an engine; None if what it needs depends on more than files and settings."""
    folder = library_folder()
    if folder is None or config.rpc or not folder.is_dir() or not computes_on_cpu_only(folder):
        return None
    models = [each for each in (config.model_path, config.draft_model, config.mmproj) if each]
    parts = [part for each in models for part in model_parts(Path(each))]
    repacking = [times for times in (times_path(), finding_path("selfcheck", build_key(folder))) if times]
    files = [*parts, *(Path(path) for path, _ in config.lora), *repacking]  # the last decide which weights are repacked
    return finding_path("memory", finding_key(folder, files, msgspec.json.encode(config), available_threads()))


def _ask(configs: list[EngineConfig]) -> MemoryEstimate:
    """What the child process answers."""
    try:
        done = run_module("cppbatch.bench.memory.memory_estimate_child", msgspec.json.encode(configs), _TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise EstimateFailed(f"llama.cpp did not report its memory needs within {_TIMEOUT_S} s") from None
    except OSError as error:
        raise EstimateFailed(f"could not start a process to query llama.cpp: {error}") from error
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=MemoryEstimate)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        raise EstimateFailed(
            f"the process that queries llama.cpp's memory needs ended with code {done.returncode}: {last[0]}"
        ) from None
