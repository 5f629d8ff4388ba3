"""Chooses -np and -c if they are not given, for the model and the free memory, without loading the model.

The largest sizes are 16 sequences (32 on a GPU) with 1,024 cells each; on a GPU more cells, so that one text may use
the model's full context length. A single sequence may use the model's context length, on a CPU up to 32,768 tokens. Of
these sizes, halved repeatedly, the first one that leaves a tenth of the memory free is chosen. --fit off takes the
largest, --fit-target sets another margin, and --fit-ctx the minimum of cells.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from cppbatch.config import EngineConfig
from cppbatch.engine.kv.layout import CELL_STEP
from cppbatch.errors import DoesNotFit, EstimateFailed, ModelError
from cppbatch.models.inspect import inspect_model
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.sizing.demand import (
    MARGIN,
    Demand,
    Margin,
    format_gib,
    mapped_bytes,
    margin_of,
    memory_demands,
)  # fmt: skip
from cppbatch.sizing.estimate import Footprint, MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.placement import CELLS_EACH, LEAST_CELLS_EACH, Engines, placements

SIZES = frozenset({"n_parallel", "n_ctx"})

_SEQUENCES, _SEQUENCES_ON_GPU = 16, 32
_LEAST_CELLS = 2048  # fewer are of little use
_MOST_CELLS_ON_GPU = 131_072
_MOST_CELLS_OF_ONE = 32_768  # on a CPU, which takes minutes for a prompt of this length


def size_candidates(config: EngineConfig, given: Set[str], *, n_ctx_train: int, on_gpu: bool) -> list[EngineConfig]:
    """The settings to choose from, largest first; at least one. Settings in `given` keep their values.

    `given`: the names of settings set by the user or a profile. `n_ctx_train`: the model's context length.
    """
    if given >= SIZES:
        return [config]
    sequences = min(_SEQUENCES_ON_GPU if on_gpu else _SEQUENCES, config.n_batch)
    if "n_parallel" in given:
        sizes = _halved_cells(config.n_parallel, _most_cells(config.n_parallel, n_ctx_train, on_gpu=on_gpu))
    elif "n_ctx" in given:
        most = max(1, min(sequences, config.n_ctx // CELL_STEP))
        sizes = [(n, config.n_ctx) for n in _halves(most, 1)]
    else:
        sizes = _halved_cells(sequences, _most_cells(sequences, n_ctx_train, on_gpu=on_gpu))
        while (last := sizes[-1]) != (1, _LEAST_CELLS):
            sizes.append((max(1, last[0] // 2), max(_LEAST_CELLS, last[1] // 2)))
    if "n_ctx" not in given:
        sizes = list(dict.fromkeys((n, max(cells, config.fit_ctx)) for n, cells in sizes))
    if not config.fit_params:
        sizes = sizes[:1]
    return [replace(config, n_parallel=n, n_ctx=cells) for n, cells in sizes]


def candidates_for(config: EngineConfig, given: Set[str]) -> list[EngineConfig]:
    """Returns candidates for the model of `config` on this machine. Only one for engines that return vectors, which
    keep no cells, and for an unreadable file, which loading will report."""
    if given >= SIZES or config.pooling:
        return [config]
    try:
        facts = inspect_model(Path(config.model_path))
    except ModelError:
        return [config]
    if facts.pooling:
        return [config]
    kernel_times(["Q8_0"])  # cached; finds out whether there is a GPU, if that is not known yet
    on_gpu = config.n_gpu_layers != 0 and has_gpu()
    return size_candidates(config, given, n_ctx_train=facts.n_ctx_train or 0, on_gpu=on_gpu)


def _most_cells(n: int, n_ctx_train: int, *, on_gpu: bool) -> int:
    if n == 1 and n_ctx_train:
        return max(_LEAST_CELLS, min(n_ctx_train, _MOST_CELLS_ON_GPU if on_gpu else _MOST_CELLS_OF_ONE))
    cells = max(n, _SEQUENCES) * CELLS_EACH
    return max(cells, min(n_ctx_train, _MOST_CELLS_ON_GPU)) if on_gpu else cells


def _halved_cells(n: int, most: int) -> list[tuple[int, int]]:
    """`n` sequences with `most` cells, with half of them ..."""
    return [(n, cells) for cells in _halves(most, max(_LEAST_CELLS, n * LEAST_CELLS_EACH))]


def _halves(most: int, least: int) -> list[int]:
    """`most`, half of it, and so on, down to `least`."""
    return [most >> i for i in range(most.bit_length()) if i == 0 or most >> i >= least]


# --- models fit ------------------------------------------------------------------------------------------------------
# Which models fit into the currently free memory, for `cppbatch models list`.


def models_fit(paths: Sequence[Path]) -> list[str]:
    """For each model: "yes", "with smaller -np -c", "no" with the memory required, or "?" if unknown."""
    readable = [path for path in paths if _is_readable(path)]
    verdicts = dict(zip(readable, _fit(readable), strict=True)) if readable else {}
    return [verdicts.get(path, "?") for path in paths]


def _is_readable(path: Path) -> bool:
    try:
        inspect_model(path)
    except ModelError:
        return False
    return True


def _fit(paths: Sequence[Path]) -> list[str]:
    sizes = [candidates_for(EngineConfig(str(path)), set()) for path in paths]
    try:
        estimate = estimate_memory([config for each in sizes for config in (each[0], each[-1])])
    except EstimateFailed:  # one of the files may crash llama.cpp
        half = len(paths) // 2
        return [*_fit(paths[:half]), *_fit(paths[half:])] if half else ["?"]
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


# --- several models --------------------------------------------------------------------------------------------------
# Whether a model fits into memory alongside other loaded models, and with which sizes.


class LoadedSizes(NamedTuple):
    """A model's settings, and the memory its engines need with them."""

    config: EngineConfig
    estimate: MemoryEstimate | None
    """None: unknown; the model is assumed to need no memory beyond what is measured."""

    @property
    def needs(self) -> int:
        """Bytes on the host and on devices, including weights mapped from the file."""
        demands = memory_demands(self.estimate, 0) if self.estimate else []
        return sum(demand.firm + demand.mapped for demand in demands)

    @property
    def firm_on_host(self) -> int:
        """Bytes that are free again after unloading it."""
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
    decided: Set[str] = frozenset(),
) -> LoadedSizes:
    """The first candidate that fits alongside the `others` and leaves its `margin_of` the free memory free; else the
    last one, if it fits at all; without others, with parts of the model on the CPU if its devices cannot hold it.

    `pinned`: those of the others that cannot be unloaded. `budget`: bytes for all models together; None: the free
    memory. `decided`: as of `first_ample`. Raises `DoesNotFit`, and `EstimateFailed`.
    """
    each = [engines(candidate) for candidate in candidates]
    estimated = estimate_memory([config for configs in each for config in configs])
    footprints = iter(estimated.footprints)
    sizes = [
        LoadedSizes(candidate, MemoryEstimate([next(footprints) for _ in configs], estimated.devices))
        for candidate, configs in zip(candidates, each, strict=True)
    ]
    if any(footprint.error for one in sizes for footprint in (one.estimate.footprints if one.estimate else [])):
        return LoadedSizes(candidates[0], None)  # loading reports what is wrong
    free, mapped = free_host_memory(), _sum_mapped(others)
    ample, least = margin_of(candidates[0]), candidates[0].fit_target or 0.0
    for one, margin in [*((one, ample) for one in sizes), (sizes[-1], least)]:
        if _fits(one, free - mapped, margin=margin) and (budget is None or one.needs + _sum(others) <= budget):
            return one
    smallest = sizes[-1]
    free_at_most = free + sum(other.firm_on_host for other in others if other not in pinned) - _sum_mapped(pinned)
    if budget is not None and smallest.needs + _sum(others) > budget:
        limit = f"the limit for all models is {format_gib(budget)} (--models-memory)"
        never = smallest.needs + _sum(pinned) > budget
        raise DoesNotFit(f"it needs {format_gib(smallest.needs)}, but {limit}", never=never)
    if len(others) == len(pinned) and _fits(smallest, free, margin=least, mapped_too=False):
        return smallest  # its weights will be read from the file again and again: slow, but nothing can be done here
    never = not _fits(smallest, free_at_most, margin=least, mapped_too=False, devices_too=not others)
    if never and not others:
        found = next(placements(candidates, engines, estimated.devices, decided), None)
        if found:
            return LoadedSizes(found.config, found.estimate)
    if least and len(others) == len(pinned) and _fits(smallest, free, margin=0.0, mapped_too=False):
        return smallest  # --fit-target is what it aims at
    message = f"it needs {format_gib(smallest.needs)} with -np {smallest.config.n_parallel} -c {smallest.config.n_ctx}"
    advice = "use a smaller model or quantisation, or lower -c and -np"
    raise DoesNotFit(f"{message}, more than {'there is' if never else 'is free'}: {advice}", never=never)


def _fits(
    sizes: LoadedSizes, host_free: int, *, margin: Margin, mapped_too: bool = True, devices_too: bool = True
) -> bool:
    assert sizes.estimate

    def fits(demand: Demand) -> bool:
        return demand.will_fit and not (mapped_too and demand.will_be_slow)

    demands = memory_demands(sizes.estimate, max(0, host_free), margin=margin)
    return all(map(fits, demands if devices_too else demands[:1]))


def _sum(models: Sequence[LoadedSizes]) -> int:
    return sum(each.needs for each in models)


def _sum_mapped(models: Sequence[LoadedSizes]) -> int:
    """Counts each file once, because processes share its pages."""
    return sum({Path(each.config.model_path): each.mapped for each in models}.values())
