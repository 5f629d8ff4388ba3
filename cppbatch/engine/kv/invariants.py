"""Checks that the accounting of the KV cache is consistent and matches llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cppbatch.engine.cells import n_held
from cppbatch.engine.kv.cached_prefix import Source
from cppbatch.engine.kv.memory import Memory
from cppbatch.engine.kv.prefix_cache import PrefixCache
from cppbatch.engine.sequence import Seq

Running = Mapping[int, Seq]
"""Sequences by seq_id."""


def check_invariants(
    memory: Memory, n_used: int, running: Running, cache: PrefixCache, free_ids: Sequence[int]
) -> None:
    """Raises `AssertionError` if an invariant of cells or seq_ids is violated (docs/architecture.md)."""
    held = _holders(running, cache)
    require(sorted([*held, *free_ids]) == list(range(memory.n_seq_ids)), "a seq_id is lost or held twice")
    require(
        all(seq_id < memory.n_seq_max for seq_id in running), "a sequence runs with a seq_id that no batch may contain"
    )
    for seq_id, holder in held.items():
        n = holder.cells.stop if holder.cells else 0
        require(holder.seq_id == seq_id, f"seq_id {seq_id} is held by the holder of {holder.seq_id}")
        require(n == holder.n_computed, f"seq_id {seq_id} has {n} cells for {holder.n_computed} tokens")
    n_cells = n_held([holder.cells for holder in held.values()])
    require(n_cells == n_used, f"{n_used} cells are used, {n_cells} held")
    in_host = sum(prefix.saved.n_bytes for prefix in cache.in_host if prefix.saved)
    in_host += sum(checkpoint.n_bytes for checkpoint in cache.checkpoints)
    require(in_host == cache.used_host_bytes <= cache.host_bytes, f"{in_host} bytes are cached in host memory")
    for seq_id in range(memory.n_seq_ids):
        n = held[seq_id].n_positions if seq_id in held else 0
        has = memory.last_position(seq_id) + 1
        require(n == has, f"seq_id {seq_id} has {has} positions in llama.cpp, {n} in the accounting")


def dump_cells(memory: Memory, n_used: int, running: Running, cache: PrefixCache, free_ids: Sequence[int]) -> str:
    """The holder of each seq_id, for the log."""
    lines = [f"{n_used} cells used, free seq_ids: {free_ids}"]
    lines += [f"seq_id {i}: {s.id}, {_sizes(s)}, {s.status.value}" for i, s in running.items()]
    lines += [f"seq_id {c.seq_id}: cached, {_sizes(c)}" for c in cache.in_cells]
    native = {i: memory.last_position(i) + 1 for i in range(memory.n_seq_ids)}
    return "\n".join([*lines, f"positions in llama.cpp: { {i: n for i, n in native.items() if n} }"])


def _sizes(holder: Source) -> str:
    return f"{holder.n_computed} tokens at {holder.n_positions} positions"


def require(condition: bool, message: str) -> None:
    """An assertion that is not removed by `python -O`."""
    if not condition:
        raise AssertionError(message)


def _holders(running: Running, cache: PrefixCache) -> dict[int, Source]:
    return {**running, **{prefix.seq_id: prefix for prefix in cache.in_cells}}
