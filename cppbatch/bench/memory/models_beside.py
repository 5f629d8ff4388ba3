"""Whether a model fits into memory beside others that are loaded, and with which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cppbatch.bench.memory.choose_sizes import MARGIN
from cppbatch.bench.memory.memory_check import Engines
from cppbatch.bench.memory.memory_demand import Demand, format_gib, free_host_memory, mapped_bytes, memory_demands
from cppbatch.bench.memory.memory_estimate import MemoryEstimate, estimate_memory
from cppbatch.config import EngineConfig
from cppbatch.errors import DoesNotFit


class LoadedSizes(NamedTuple):
    """A model's settings, and the memory that its engines need with them."""

    config: EngineConfig
    estimate: MemoryEstimate | None
    """None: it is not known; the model counts as needing nothing beside what is measured."""

    @property
    def needs(self) -> int:
        """Bytes on the host and on devices, weights mapped from the file included."""
        demands = memory_demands(self.estimate, 0) if self.estimate else []
        return sum(demand.firm + demand.mapped for demand in demands)

    @property
    def firm_on_host(self) -> int:
        """Bytes that are free again when it has left."""
        return memory_demands(self.estimate, 0)[0].firm if self.estimate else 0

    @property
    def mapped(self) -> int:
        """Bytes of weights mapped from its file, which the system counts as free."""
        return max(map(mapped_bytes, self.estimate.footprints), default=0) if self.estimate else 0


def first_beside(
    candidates: Sequence[EngineConfig],
    others: Sequence[LoadedSizes],
    pinned: Sequence[LoadedSizes],
    *,
    engines: Engines,
    budget: int | None = None,
) -> LoadedSizes:
    """The first candidate that fits beside the `others` and leaves `MARGIN` of the free memory free; else the last one,
    if it fits at all.

    `pinned`: those of the others that do not leave. `budget`: bytes that all models may need together; None: what is
    free. Raises `DoesNotFit`, and `EstimateFailed`.
    """
    each = [engines(candidate) for candidate in candidates]
    estimated = estimate_memory([config for configs in each for config in configs])
    footprints = iter(estimated.footprints)
    sizes = [
        LoadedSizes(candidate, MemoryEstimate([next(footprints) for _ in configs], estimated.devices))
        for candidate, configs in zip(candidates, each, strict=True)
    ]
    if any(footprint.error for one in sizes for footprint in (one.estimate.footprints if one.estimate else [])):
        return LoadedSizes(candidates[0], None)  # loading says what is wrong
    free, mapped = free_host_memory(), _mapped(others)
    for one, margin in [*((one, MARGIN) for one in sizes), (sizes[-1], 0.0)]:
        if _fits(one, free - mapped, margin=margin) and (budget is None or one.needs + _sum(others) <= budget):
            return one
    smallest = sizes[-1]
    free_at_most = free + sum(other.firm_on_host for other in others if other not in pinned) - _mapped(pinned)
    if budget is not None and smallest.needs + _sum(others) > budget:
        limit = f"the limit for all models is {format_gib(budget)} (--models-memory)"
        never = smallest.needs + _sum(pinned) > budget
        raise DoesNotFit(f"it needs {format_gib(smallest.needs)}, but {limit}", never=never)
    if len(others) == len(pinned) and _fits(smallest, free, margin=0.0, mapped_too=False):
        return smallest  # its weights will be read from the file again and again: slow, but nothing can be done here
    never = not _fits(smallest, free_at_most, margin=0.0, mapped_too=False, devices_too=not others)
    message = f"it needs {format_gib(smallest.needs)} with -np {smallest.config.n_parallel} -c {smallest.config.n_ctx}"
    advice = "use a smaller model or quantisation, or lower -c and -np"
    raise DoesNotFit(f"{message}, more than {'there is' if never else 'is free'}: {advice}", never=never)


def _fits(
    sizes: LoadedSizes, host_free: int, *, margin: float, mapped_too: bool = True, devices_too: bool = True
) -> bool:
    assert sizes.estimate

    def fits(demand: Demand) -> bool:
        return demand.will_fit and not (mapped_too and demand.will_be_slow)

    demands = memory_demands(sizes.estimate, max(0, host_free), margin=margin)
    return all(map(fits, demands if devices_too else demands[:1]))


def _sum(models: Sequence[LoadedSizes]) -> int:
    return sum(each.needs for each in models)


def _mapped(models: Sequence[LoadedSizes]) -> int:
    """Of each file once: processes share its pages."""
    return sum({Path(each.config.model_path): each.mapped for each in models}.values())
