"""Estimating the memory of engines: a child process, which may crash, lets llama.cpp simulate its allocations."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cppbatch.child_processes import child_command, run
from cppbatch.config import EngineConfig, available_threads
from cppbatch.errors import EstimateFailed
from cppbatch.findings import (
    build_key,
    computes_on_cpu_only,
    file_stamp,
    finding_key,
    finding_path,
    library_folder,
    read_finding,
    write_finding,
)
from cppbatch.models.find import model_parts
from cppbatch.models.kernels import times_path
from cppbatch.sizing.buffers import Buffer

_CACHE = re.compile(r"size =\s*([\d.]+) MiB \(\s*(\d+) cells,\s*(\d+) layers,\s*\d+/(\d+) seqs\)")
_STATES = re.compile(r"size =\s*([\d.]+) MiB \(\s*(\d+) cells,.* seqs\s+(\d+) rs_seq\)")
_OTHER_STATES = re.compile(r"DSV4 \S+ state buffer size =\s*([\d.]+) MiB")


class SequenceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a sequence in bytes: cells of full attention, cells of a sliding window, recurrent states."""

    token_bytes: float = 0.0
    """Per token."""
    window: int = 0
    """Tokens of the sliding window; 0: no window."""
    window_token_bytes: float = 0.0
    """Additionally per token of the last `window` tokens."""
    state_bytes: int = 0
    """Independent of the number of tokens."""

    def bytes_of(self, n: int) -> int:
        """A sequence of `n` tokens."""
        return round(n * self.token_bytes) + self.checkpoint_bytes(n)

    def checkpoint_bytes(self, n: int) -> int:
        """A checkpoint of it: the memory that cannot be truncated."""
        return round(min(n, self.window) * self.window_token_bytes) + self.state_bytes


def read_sequence_memory(lines: Iterable[str], *, window: int, n_sequences: int) -> SequenceMemory:
    """Parses the log of creating a context for `n_sequences` of a model with this sliding window."""
    in_window, token_bytes, window_token_bytes, state_bytes = False, 0.0, 0.0, 0.0
    for line in lines:
        if "creating" in line and "KV cache" in line:
            in_window = bool(re.search(r"creating\s+SWA", line))
        elif found := _STATES.search(line):
            state_bytes += float(found[1]) * 2**20 / int(found[2]) / (1 + int(found[3]))
        elif found := _OTHER_STATES.search(line):
            state_bytes += float(found[1]) * 2**20 / n_sequences
        elif found := _CACHE.search(line):
            each = float(found[1]) * 2**20 / (int(found[2]) * int(found[4]))
            if in_window:
                window_token_bytes += each
            else:
                token_bytes += each
    return SequenceMemory(
        token_bytes=token_bytes,
        window=window if window_token_bytes else 0,
        window_token_bytes=window_token_bytes,
        state_bytes=round(state_bytes),
    )


class Device(msgspec.Struct, frozen=True):
    """A GPU, or a device of an RPC worker. Memory in bytes, 0 if the driver does not report it."""

    name: str
    """llama.cpp's, of an RPC worker with its address."""
    description: str
    """The driver's name of the GPU; empty for a device of an RPC worker."""
    free: int
    total: int
    buffer_types: tuple[str, ...] = ()
    """llama.cpp's names of its buffers, without a suffix that they have on Metal; (): its name."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one engine, or why the engine cannot be created."""

    buffers: list[Buffer] = []
    kv_layout: str = ""
    sequence_cells: int = 0
    """Maximum KV cells of one sequence."""
    n_layers: int = 0
    n_ctx_train: int = 0
    sequence: SequenceMemory = SequenceMemory()
    """The memory of one sequence in cells and states."""
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

    Footprints on the CPU are cached by everything they depend on. With a GPU or RPC workers, llama.cpp is run each
    time, and reports the free memory there. Raises `EstimateFailed` if the child process fails.
    """
    unique = list(dict.fromkeys(configs))
    paths = {config: path for config in unique if (path := _footprint_path(config))}
    known = {config: each for config, path in paths.items() if (each := read_finding(path, Footprint))}
    if len(known) == len(unique):
        return MemoryEstimate([known[config] for config in configs], [])
    files = {config: _file_stamps(config) for config in unique}
    answer = _ask(unique)
    by_config = dict(zip(unique, answer.footprints, strict=True))
    for config, footprint in by_config.items():
        # the path is computed again: the child process may have checked the build, or timed kernels, for the first time
        is_known = footprint.error is None and not answer.devices and _file_stamps(config) == files[config]
        if is_known and (path := _footprint_path(config)):
            write_finding(path, footprint)
    return MemoryEstimate([by_config[config] for config in configs], answer.devices)


def _files(config: EngineConfig) -> list[Path]:
    """The files that an engine loads."""
    models = [each for each in (config.model_path, config.draft_model, config.mmproj) if each]
    return [*(part for each in models for part in model_parts(Path(each))), *(Path(path) for path, _ in config.lora)]


def _file_stamps(config: EngineConfig) -> list[tuple[int, ...]]:
    return [file_stamp(file) for file in _files(config)]


def _footprint_path(config: EngineConfig) -> Path | None:
    """The file for an engine's footprint; None if its memory depends on more than files and settings."""
    folder = library_folder()
    if folder is None or config.rpc or not folder.is_dir() or not computes_on_cpu_only(folder):
        return None
    repacking = [times for times in (times_path(), finding_path("selfcheck", build_key(folder))) if times]
    files = [*_files(config), *repacking]  # the last decide which weights are repacked
    return finding_path("memory", finding_key(folder, files, msgspec.json.encode(config), available_threads()))


def _ask(configs: list[EngineConfig]) -> MemoryEstimate:
    """The answer of the child process."""
    # the default model takes 0.3 s; the header of a large file on a slow disk takes longer
    seconds = 60 + 10 * (len(configs) - 1)
    try:
        command = child_command("cppbatch.sizing.estimate_child")
        done = run(command, stdin=msgspec.json.encode(configs), seconds=seconds)
    except subprocess.TimeoutExpired:
        raise EstimateFailed(f"llama.cpp did not report its memory needs within {seconds} s") from None
    except OSError as error:
        raise EstimateFailed(f"could not start a process to query llama.cpp: {error}") from error
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=MemoryEstimate)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        raise EstimateFailed(
            f"the process that queries llama.cpp's memory needs ended with code {done.returncode}: {last[0]}"
        ) from None
