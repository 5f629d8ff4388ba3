"""Which models fit into the memory that is free now, for `cppbatch models list`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cppbatch.bench.memory.choose_sizes import MARGIN, candidates_for
from cppbatch.bench.memory.memory_demand import format_gib, free_host_memory, memory_demands
from cppbatch.bench.memory.memory_estimate import Footprint, MemoryEstimate, estimate_memory
from cppbatch.config import EngineConfig
from cppbatch.errors import EstimateFailed


def models_fit(paths: Sequence[Path]) -> list[str]:
    """For each model: "yes", "with smaller -np -c", "no" with what it needs, or "?" if llama.cpp does not say."""
    sizes = [candidates_for(EngineConfig(str(path)), set()) for path in paths]
    try:
        estimate = estimate_memory([config for each in sizes for config in (each[0], each[-1])])
    except EstimateFailed:
        return ["?"] * len(paths)
    free = free_host_memory()

    def verdict(usual: Footprint, smallest: Footprint) -> str:
        if usual.error or smallest.error:
            return "?"
        ample, least = (
            memory_demands(MemoryEstimate([each], estimate.devices), free, margin=MARGIN) for each in (usual, smallest)
        )
        if all(each.will_fit and not each.will_be_slow for each in ample):
            return "yes"
        if all(each.will_fit and not each.will_be_slow for each in least):
            return "with smaller -np -c"
        return f"no: {format_gib(sum(each.firm + each.mapped for each in least))}"

    footprints = iter(estimate.footprints)
    return [verdict(next(footprints), next(footprints)) for _ in paths]
