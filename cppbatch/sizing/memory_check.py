"""Choosing settings that fit into memory before the model is loaded, and refusing others, with suggestions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from msgspec.structs import replace

from cppbatch.config import FLOAT_CACHES, EngineConfig
from cppbatch.errors import ConfigError, EstimateFailed
from cppbatch.sizing.buffers import MAPPED
from cppbatch.sizing.demand import (
    HOST,
    Demand,
    Margin,
    format_gib,
    location,
    margin_of,
    memory_demands,
)  # fmt: skip
from cppbatch.sizing.estimate import Footprint, MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.placement import LEAST_CELLS, LEAST_CELLS_EACH, Engines, placements
from cppbatch.sizing.placement_search import Speeds

log = logging.getLogger("cppbatch.memory")

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
