"""What attention is chosen by: its cost on this CPU by cache types and flash attention, timed in a child process and
cached, and the sizes of a model's requests."""

from __future__ import annotations

import hashlib
import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from cppbatch import child_processes
from cppbatch.config import CacheType, KvLayout
from cppbatch.findings import build_key, finding_path, library_folder, read_finding, write_finding
from cppbatch.models.file_header import read_header
from cppbatch.models.find import file_identity, model_parts
from cppbatch.models.kernels import interpolate

log = logging.getLogger("cppbatch.kernels")

PIECE = 64
"""Prompt tokens whose attention is timed together: ggml has a kernel for this number."""
_OTHER_ATTENTION = (
    "attention.sliding_window", "attention.kv_lora_rank", "attn_logit_softcapping", "attention.alibi_bias_max",
    "attention.max_alibi_bias", "ssm.state_size", "wkv.head_size", "shortconv.l_cache", "attention.indexer.head_count",
)  # fmt: skip

Seconds = dict[int, float]
"""{cells of each sequence: seconds of one thread for one token in one layer}."""


class Attention(NamedTuple):
    """A way of computing attention."""

    flash_attn: Literal["on", "off"]
    k: CacheType
    v: CacheType

    @property
    def name(self) -> str:
        """The name in tables: "on f16 q8_0"."""
        return f"{self.flash_attn} {self.types}"

    @property
    def types(self) -> str:
        """The types of keys and values: "f16 q8_0"."""
        return f"{self.k} {self.v}"


class Shape(msgspec.Struct, frozen=True):
    """The heads of a model, the same in all layers."""

    n_layer: int
    n_head: int
    n_head_kv: int
    head_k: int
    """Values of a key, and of a query."""
    head_v: int


class AttentionTask(msgspec.Struct, frozen=True):
    """The configuration to time."""

    shape: Shape
    kv_layout: KvLayout
    """`unified` or `per-sequence`."""
    n_parallel: int
    """Sequences; at most 2 in the per-sequence layout: each takes the same time, and a single one uses other
    kernels."""
    n_memory: int
    """Cells of the memory of each stream; of all sequences in the unified layout."""


class AttentionTimes(msgspec.Struct, frozen=True):
    """The seconds by `Attention.name`. Kinds that the CPU cannot compute are missing."""

    decode: dict[str, Seconds]
    prefill: dict[str, Seconds]
    has_amx: bool = False

    def decode_s(self, attention: Attention, n_cells: float) -> float:
        """Seconds of one layer for a decode row of a sequence, each with this many cells. Extrapolates linearly beyond
        the longest timed context, since each cell is read once."""
        return _at(self.decode[attention.name], _read(attention, n_cells))

    def prefill_s(self, attention: Attention, n_cells: float) -> float:
        """The same for one of `PIECE` prompt tokens, the last of which is in this cell."""
        return _at(self.prefill[attention.name], _read(attention, n_cells))


def _read(attention: Attention, n_cells: float) -> float:
    """The cells that are read: llama.cpp computes a multiple of 256, and only flash attention leaves the others out."""
    return n_cells + (128 if attention.flash_attn == "off" else 0)


def _at(seconds: Mapping[int, float], n_cells: float) -> float:
    a, b = [0, *sorted(seconds)][-2:]
    beyond = max(0.0, n_cells - b) * max(0.0, seconds[b] - seconds.get(a, 0.0)) / (b - a)
    return interpolate(n_cells, seconds) + beyond


def attention_shape(path: Path) -> Shape | None:
    """The heads of a model whose layers all have plain attention over all cells; None for other models.

    Raises `ModelError` if the file cannot be read.
    """
    header = read_header(model_parts(path)[0])
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if any(metadata.get(f"{architecture}.{name}") for name in _OTHER_ATTENTION):
        return None
    names = ("block_count", "attention.head_count", "embedding_length")
    n_layer, n_head, n_embd = (metadata.get(f"{architecture}.{name}", 0) for name in names)
    n_head_kv = metadata.get(f"{architecture}.attention.head_count_kv", n_head)
    if not all(isinstance(n, int) and n > 0 for n in (n_layer, n_head, n_embd, n_head_kv)):
        return None  # missing, or arrays: layers differ
    given = (header.whole_number(f"{architecture}.attention.{name}_length") for name in ("key", "value"))
    return Shape(n_layer, n_head, n_head_kv, *(n or n_embd // n_head for n in given))


def attention_times(task: AttentionTask) -> AttentionTimes | None:
    """The times, measured unless they are cached: about a second. None if they cannot be measured."""
    key = hashlib.sha256(msgspec.json.encode(task)).hexdigest()[:12]
    folder = library_folder()
    if folder is None:
        return None
    path = finding_path("attention", f"{build_key(folder)}-{key}")
    if known := read_finding(path, AttentionTimes):
        return known
    try:
        done = child_processes.run(child_command(), stdin=msgspec.json.encode(task), seconds=60)
        done.check_returncode()
        times = msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=AttentionTimes)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        log.info("attention cannot be timed: %s", error)
        return None
    write_finding(path, times)
    return times


def child_command() -> list[str]:
    """The command of the child process."""
    return child_processes.child_command("cppbatch.llama.attention_child")


# Kept when an engine ends, so that later starts can choose attention for them.


class RequestSizes(NamedTuple):
    """Sums over requests. Those of earlier engines count half as much each time another one ends."""

    requests: float
    prompt_tokens: float
    """Including those from the prefix cache."""
    computed_tokens: float
    """Prompt tokens that were not in the prefix cache."""
    output_tokens: float

    @property
    def context(self) -> float:
        """Tokens of a sequence while it decodes, on average."""
        return (self.prompt_tokens + self.output_tokens / 2) / self.requests


def known_sizes(model: Path) -> RequestSizes | None:
    """The sizes of earlier requests to this file; None if there were few. Raises `OSError` if it cannot be read."""
    known = read_finding(_sizes_path(model), RequestSizes)
    # fewer than 16 requests say little about the next ones
    return known if known and known.requests >= 16 and known.output_tokens else None


def keep_sizes(model: Path, sizes: RequestSizes) -> None:
    """Adds the requests of an engine to those of earlier ones. Raises `OSError` if the file cannot be read."""
    path = _sizes_path(model)
    before = read_finding(path, RequestSizes) or RequestSizes(0, 0, 0, 0)
    write_finding(path, RequestSizes(*(new + old / 2 for new, old in zip(sizes, before, strict=True))))


def _sizes_path(model: Path) -> Path:
    return finding_path("request-sizes", hashlib.sha256(repr(file_identity(model)).encode()).hexdigest()[:16])
