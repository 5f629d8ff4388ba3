"""Chooses -np and -c if they are not given, for the model and the free memory, without loading the model.

The largest sizes are 16 sequences (32 on a GPU) with 1,024 cells each; on a GPU more cells, so that one text may use
the model's full context length. A single sequence may use the model's context length, on a CPU up to 32,768 tokens. Of
these sizes, halved repeatedly, the first one that leaves a tenth of the memory free is chosen. --fit off takes the
largest, --fit-target sets another margin, and --fit-ctx the minimum of cells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from cppbatch.config import FLOAT_CACHES, EngineConfig
from cppbatch.engine.kv.layout import CELL_STEP
from cppbatch.errors import ConfigError, DoesNotFit, EstimateFailed, ModelError
from cppbatch.models.inspect import inspect_model
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.sizing.buffers import MAPPED
from cppbatch.sizing.demand import (
    HOST,
    MARGIN,
    Demand,
    Margin,
    format_gib,
    location,
    mapped_bytes,
    margin_of,
    memory_demands,
)  # fmt: skip
from cppbatch.sizing.estimate import Footprint, MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.placement import CELLS_EACH, LEAST_CELLS, Speeds, placements

SIZES = frozenset({"n_parallel", "n_ctx"})

_SEQUENCES, _SEQUENCES_ON_GPU = 16, 32
LEAST_CELLS_EACH, _LEAST_CELLS = 512, 2048  # fewer are of little use, for a sequence and for an engine
_MOST_CELLS_ON_GPU = 131_072
_MOST_CELLS_OF_ONE = 32_768  # on a CPU, which takes minutes for a prompt of this length


def size_candidates(config: EngineConfig, given: Set[str], *, n_ctx_train: int, on_gpu: bool) -> list[EngineConfig]:
    """The settings to choose from, largest first; at least one. Settings in `given` are as in `config`.

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


# --- memory check ----------------------------------------------------------------------------------------------------
# Choosing settings that fit into memory before the model is loaded, and refusing others, with suggestions.


log = logging.getLogger("cppbatch.memory")

Engines = Callable[[EngineConfig], list[EngineConfig]]
"""Returns the settings of every engine that will run, one per worker."""

_HALVINGS = 12
_OVERRIDE = "If this is wrong, disable this check with --no-memory-check (CPPBATCH_MEMORY_CHECK=0)"


class Planned(NamedTuple):
    """Settings, and the memory they need."""

    config: EngineConfig
    estimate: MemoryEstimate | None
    """None: it failed."""
    speeds: Speeds | None = None
    """What is expected of a model that was placed."""


def first_ample(
    candidates: Sequence[EngineConfig],
    engines: Engines = lambda config: [config],
    decided: Set[str] = frozenset(),
) -> Planned:
    """The first candidate that fits with the weights and leaves its `margin_of` the memory free; the last one if none
    does, with parts of the model on the CPU if its devices cannot hold it.

    `decided`: the names of settings that may not change. If the estimate fails, the first one, and a warning is logged.
    """
    return _placed(_first_ample(candidates, engines), candidates, engines, decided)


def _first_ample(candidates: Sequence[EngineConfig], engines: Engines) -> Planned:
    planned = _plan(candidates[0], engines)
    smaller = candidates[1:]
    margin = margin_of(planned.config)
    if planned.estimate is None or not smaller or _is_ample(planned.estimate, margin):
        return planned
    try:
        answers = iter(estimate_memory([one for each in smaller for one in engines(each)]).footprints)
    except EstimateFailed as error:
        log.warning("could not look for smaller sizes: %s", error)
        return planned
    for each in smaller:
        estimate = MemoryEstimate([next(answers) for _ in engines(each)], planned.estimate.devices)
        if _is_ample(estimate, margin):
            break
    return Planned(each, estimate)


def _placed(planned: Planned, candidates: Sequence[EngineConfig], engines: Engines, decided: Set[str]) -> Planned:
    """With parts of the model on the CPU, if the sizes that are left do not fit on its devices; on the fastest of
    several GPUs, if they do."""
    if planned.estimate is None:
        return planned
    demands = memory_demands(planned.estimate, free_host_memory(), margin=planned.config.fit_target or 0.0)
    n_gpus = sum(bool(each.description) for each in planned.estimate.devices)
    fits = all(each.will_fit for each in demands if each.where != HOST)
    is_spread = n_gpus > 1 and not (planned.config.device_names or planned.config.tensor_split)
    is_small = _is_small(planned.config, candidates[0]) and planned.estimate.devices
    if fits and not is_spread and not is_small:
        return planned
    try:
        among = [planned.config] if fits and not is_small else candidates
        found = next(placements(among, engines, planned.estimate.devices, decided), None)
    except EstimateFailed as error:
        log.warning("could not look for a placement that fits: %s", error)
        return planned
    return Planned(*found) if found else planned


def _is_small(config: EngineConfig, largest: EngineConfig) -> bool:
    """Whether a few weights on the CPU might be worth larger sizes."""
    return config.n_parallel < min(4, largest.n_parallel) or config.n_ctx < min(LEAST_CELLS, largest.n_ctx)


def _plan(config: EngineConfig, engines: Engines) -> Planned:
    try:
        estimate = estimate_memory(engines(config))
    except EstimateFailed as error:
        log.warning("could not check whether the model fits into memory: %s", error)
        return Planned(config, None)
    if failed := next((each.error for each in estimate.footprints if each.error), None):
        log.info("could not check whether the model fits into memory: %s", failed)  # as will loading
        return Planned(config, None)
    return Planned(config, estimate)


def _is_ample(estimate: MemoryEstimate, margin: Margin) -> bool:
    demands = memory_demands(estimate, free_host_memory(), margin=margin)
    return all(each.will_fit and not each.will_be_slow for each in demands)


def check_memory(config: EngineConfig, engines: Engines = lambda config: [config]) -> None:
    """Raises `ConfigError` if these engines need more memory than is free.

    If the estimate fails, logs a warning and lets the model load.
    """
    check_planned(_plan(config, engines), engines)


def check_planned(planned: Planned, engines: Engines = lambda config: [config]) -> None:
    """Raises `ConfigError` if engines of this estimate need more memory than is free."""
    config, estimate = planned.config, planned.estimate
    if estimate is None:
        return
    needed = memory_demands(estimate, free_host_memory())
    if short := [each for each in needed if not each.will_fit]:
        raise ConfigError(_refusal(config, short, estimate, engines))
    for each in needed:
        if each.will_be_slow:
            log.warning(
                "the weights will not stay in memory: %s are free, but %s are needed in addition to %s of weights, "
                "which will be read from the file repeatedly. Use a smaller model, or lower -c or -np",
                *map(format_gib, (each.free, each.firm, each.mapped)),
            )


def memory_shortage(config: EngineConfig) -> str | None:
    """Why another engine with these settings does not fit into the currently free memory; None: it fits.

    Also None, with a log line, if the estimate fails, since loading will show. Takes 0.3 s or more.
    """
    try:
        estimate = estimate_memory([config])
    except EstimateFailed as error:
        log.warning("could not check whether another worker fits into memory: %s", error)
        return None
    short = [each for each in memory_demands(estimate, free_host_memory()) if not each.will_fit]
    if not short:
        return None
    worst = max(short, key=lambda each: each.firm - each.free)
    place = "the host's memory" if worst.where == HOST else worst.where
    return f"it needs {format_gib(worst.firm)} of {place}, but only {format_gib(worst.free)} are free"


def _refusal(config: EngineConfig, short: list[Demand], estimate: MemoryEstimate, engines: Engines) -> str:
    worst = max(short, key=lambda each: each.firm - each.free)
    place = "the host's memory" if worst.where == HOST else worst.where
    workers = f" by {len(estimate.footprints)} workers" if len(estimate.footprints) > 1 else ""
    parts = _largest_parts(estimate.footprints[0], worst.where, estimate)
    message = (
        f"-c {config.n_ctx} -np {config.n_parallel} needs {format_gib(worst.firm)} of {place}{workers} ({parts}), but "
        f"only {format_gib(worst.free)} are free"
    )
    fitting = _fitting_flags(config, worst.where, estimate, engines)
    advice = f"It would fit with {', or with '.join(fitting)}" if fitting else "Use a smaller model or quantisation"
    return f"{message}. {advice}. {_OVERRIDE}"


def _largest_parts(footprint: Footprint, where: str, estimate: MemoryEstimate) -> str:
    buffers = [b for b in footprint.buffers if b.buffer_type != MAPPED and location(b, estimate.devices) == where]
    largest = sorted(buffers, key=lambda buffer: -buffer.n_bytes)[:3]
    return ", ".join(f"{buffer.kind} {format_gib(buffer.n_bytes)}" for buffer in largest)


def _fitting_flags(config: EngineConfig, place: str, estimate: MemoryEstimate, engines: Engines) -> list[str]:
    """Returns the smallest change of each kind that fits, as flags."""
    groups = list(alternatives(config, n_layers=estimate.footprints[0].n_layers if place != HOST else 0))
    configs = [engines(changed) for group in groups for _, changed in group]
    try:
        answers = iter(estimate_memory([one for several in configs for one in several]).footprints)
    except EstimateFailed as error:
        log.info("could not find sizes that fit: %s", error)
        return []
    free = free_host_memory()
    fits: dict[EngineConfig, bool] = {}
    for (_, changed), several in zip((each for group in groups for each in group), configs, strict=True):
        parts = [next(answers) for _ in several]
        needed = memory_demands(MemoryEstimate(parts, estimate.devices), free)
        fits[changed] = all(each.will_fit for each in needed) and not any(part.error for part in parts)
    return [flags for group in groups if (flags := next((f for f, changed in group if fits[changed]), None))]


def alternatives(config: EngineConfig, *, n_layers: int = 0) -> Iterator[list[tuple[str, EngineConfig]]]:
    """Yields settings that need less memory: groups of flags and the resulting config, from most to least memory.

    `n_layers`: of the model; 0: do not suggest fewer layers on the GPU.
    """
    cells = [config.n_ctx >> i for i in range(1, _HALVINGS)]
    yield [(f"-c {n}", replace(config, n_ctx=n)) for n in cells if n >= max(config.n_parallel, LEAST_CELLS_EACH)]
    sizes = [(config.n_parallel >> i, config.n_ctx >> i) for i in range(1, _HALVINGS)]
    yield [(f"-np {n} -c {c}", replace(config, n_parallel=n, n_ctx=c)) for n, c in sizes if n and c >= LEAST_CELLS_EACH]
    if config.flash_attn != "off" and {config.cache_type_k, config.cache_type_v} <= {*FLOAT_CACHES}:
        yield [("-ctk q8_0 -ctv q8_0", replace(config, cache_type_k="q8_0", cache_type_v="q8_0"))]
    if n_layers and config.n_gpu_layers:
        on_gpu = [n_layers * part // 8 for part in range(7, -1, -1)]
        yield [(f"-ngl {n}", replace(config, n_gpu_layers=n)) for n in on_gpu]
    steps = [config.n_batch >> i for i in range(1, _HALVINGS)]
    yield [(f"-b {n}", replace(config, n_batch=n)) for n in steps if n >= max(config.n_parallel, 64)]


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
