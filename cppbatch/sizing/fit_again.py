"""Chooses smaller settings for an engine whose memory has run out: fewer cells, then more of the model on the CPU.

The sizes were chosen, or given, for the memory that was free at the start. Another program may have taken some of it,
or the driver may need more than llama.cpp's plan. Each time the memory runs out, a larger part of it stays free.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from cppbatch.config import CPU_PARTS, EngineConfig, flag_of
from cppbatch.errors import EstimateFailed, OutOfMemory
from cppbatch.sizing.demand import MARGIN, memory_demands
from cppbatch.sizing.estimate import MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.memory_check import memory_shortage
from cppbatch.sizing.placement import LEAST_CELLS_EACH, PLACED, placements
from cppbatch.sizing.sizes import SIZES

if TYPE_CHECKING:
    from cppbatch.cluster.engines.supervisor import Refit

log = logging.getLogger("cppbatch.memory")

_PLACES = ("n_gpu_layers", "override_tensor", *CPU_PARTS)


def refit(asked: EngineConfig) -> Refit:
    """The rule for an engine of which `asked` says where its layers are, before a plan for free memory changed that."""
    return partial(fit_again, asked)


def fit_again(asked: EngineConfig, failed: EngineConfig, n_failures: int) -> EngineConfig:
    """The largest sizes below those of `failed` that fit into the memory that is free now, with the layers where
    `asked` has them; else the placement with the most on the devices that fits.

    `n_failures`: how often the memory has run out; 0.1 of the free memory stays free for each, up to 0.4. Given sizes
    and layers are changed too, but layers that are all on the CPU stay there. Raises `OutOfMemory`, with what the
    smallest sizes lack, if nothing fits.
    """
    margin = min(0.4, MARGIN * n_failures)
    sizes = smaller_sizes(failed.n_parallel, failed.n_ctx)
    smaller = [replace(failed, n_parallel=n, n_ctx=cells) for n, cells in sizes]
    is_moved = any(getattr(asked, name) != getattr(failed, name) for name in _PLACES)
    try:
        answer, free = estimate_memory([*smaller, failed]), free_host_memory()
        for config, footprint in zip([] if is_moved else smaller, answer.footprints, strict=False):
            demands = memory_demands(MemoryEstimate([footprint], answer.devices), free, margin=margin)
            if not footprint.error and all(demand.will_fit for demand in demands):
                return config
        if answer.devices and asked.n_gpu_layers:
            candidates = [replace(each, **_automatic_places(asked)) for each in (failed, *smaller)]
            found = placements(candidates, _alone, answer.devices, SIZES, margin=margin)
            if other := next((each.config for each in found if each.config != failed), None):
                return other
    except EstimateFailed as error:
        log.warning("could not look for sizes that fit: %s", error)
        if smaller:
            return smaller[0]
    least = [failed, *smaller][-1]
    lacks = memory_shortage(least) or f"less than {margin:.0%} of the memory would stay free"
    raise OutOfMemory(
        f"smaller settings do not fit either: with {flag_of('n_ctx')} {least.n_ctx} {flag_of('n_parallel')} "
        f"{least.n_parallel}, {lacks}. End the programs that use the memory, or use a smaller model or quantisation"
    )


def _alone(config: EngineConfig) -> list[EngineConfig]:
    return [config]


def _automatic_places(asked: EngineConfig) -> dict[str, Any]:
    default = EngineConfig("")
    given = {name: getattr(asked, name) for name in PLACED}
    return given | {name: getattr(default, name) for name in _PLACES}


def smaller_sizes(n_parallel: int, n_ctx: int) -> list[tuple[int, int]]:
    """Sequences and cells, largest first: half of the cells while each sequence has 512, then half of both."""
    sizes = []
    while n_ctx > LEAST_CELLS_EACH or n_parallel > 1:
        if n_ctx // 2 < n_parallel * LEAST_CELLS_EACH:
            n_parallel = max(1, n_parallel // 2)
        n_ctx = max(min(n_ctx, LEAST_CELLS_EACH), n_ctx // 2)
        sizes.append((n_parallel, n_ctx))
    return sizes
