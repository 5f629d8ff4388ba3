"""Choosing settings that fit into memory before the model is loaded, and refusing others, with suggestions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from cppbatch.bench.memory.choose_sizes import MARGIN
from cppbatch.bench.memory.memory_demand import HOST, Demand, format_gib, free_host_memory, location, memory_demands
from cppbatch.bench.memory.memory_estimate import Footprint, MemoryEstimate, estimate_memory
from cppbatch.bench.memory.weights import MAPPED
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, EstimateFailed

log = logging.getLogger("cppbatch.memory")

Engines = Callable[[EngineConfig], list[EngineConfig]]
"""Returns the settings of every engine that will run: one for each worker."""

_MIN_CELLS = 512
_HALVINGS = 12
_OVERRIDE = "If this is wrong, disable this check with --no-memory-check (CPPBATCH_MEMORY_CHECK=0)"


class Planned(NamedTuple):
    """Settings, and what they need."""

    config: EngineConfig
    estimate: MemoryEstimate | None
    """None: it failed."""


def first_ample(candidates: Sequence[EngineConfig], engines: Engines = lambda config: [config]) -> Planned:
    """The first candidate that fits with the weights and leaves `MARGIN` of the memory free; the last one if none does.

    If the estimate fails, the first one, and a warning is logged.
    """
    planned = _planned(candidates[0], engines)
    smaller = candidates[1:]
    if planned.estimate is None or not smaller or _is_ample(planned.estimate):
        return planned
    try:
        answers = iter(estimate_memory([one for each in smaller for one in engines(each)]).footprints)
    except EstimateFailed as error:
        log.warning("smaller sizes were not found: %s", error)
        return planned
    for each in smaller:
        estimate = MemoryEstimate([next(answers) for _ in engines(each)], planned.estimate.devices)
        if _is_ample(estimate):
            break
    return Planned(each, estimate)


def _planned(config: EngineConfig, engines: Engines) -> Planned:
    try:
        estimate = estimate_memory(engines(config))
    except EstimateFailed as error:
        log.warning("whether the model fits into memory was not checked: %s", error)
        return Planned(config, None)
    if failed := next((each.error for each in estimate.footprints if each.error), None):
        log.info("whether the model fits into memory was not checked: %s", failed)  # as will loading
        return Planned(config, None)
    return Planned(config, estimate)


def _is_ample(estimate: MemoryEstimate) -> bool:
    demands = memory_demands(estimate, free_host_memory(), margin=MARGIN)
    return all(each.will_fit and not each.will_be_slow for each in demands)


def check_memory(config: EngineConfig, engines: Engines = lambda config: [config]) -> None:
    """Raises `ConfigError` if these engines need more memory than is free.

    If the estimate fails, logs a warning and lets the model load.
    """
    check_planned(_planned(config, engines), engines)


def check_planned(planned: Planned, engines: Engines = lambda config: [config]) -> None:
    """As `check_memory`, of settings whose estimate is known."""
    config, estimate = planned
    if estimate is None:
        return
    needed = memory_demands(estimate, free_host_memory())
    if short := [each for each in needed if not each.will_fit]:
        raise ConfigError(_refusal(config, short, estimate, engines))
    for each in needed:
        if each.will_be_slow:
            log.warning(
                "the weights will not stay in memory: %s are free, %s needed beside %s of weights, and these will be "
                "read from the file again and again. Take a smaller model, or lower -c or -np",
                *map(format_gib, (each.free, each.firm, each.mapped)),
            )


def memory_shortage(config: EngineConfig) -> str | None:
    """Why one more engine with these settings does not fit into the memory that is free now; None if it does.

    None as well, with a line in the log, if the estimate fails: loading will tell. Takes 0.3 s or more.
    """
    try:
        estimate = estimate_memory([config])
    except EstimateFailed as error:
        log.warning("whether another worker fits into memory was not checked: %s", error)
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
    """Returns for each kind of change the smallest one that fits, as flags."""
    groups = list(alternatives(config, n_layers=estimate.footprints[0].n_layers if place != HOST else 0))
    configs = [engines(changed) for group in groups for _, changed in group]
    try:
        answers = iter(estimate_memory([one for several in configs for one in several]).footprints)
    except EstimateFailed as error:
        log.info("what would fit was not found out: %s", error)
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
    yield [(f"-c {n}", replace(config, n_ctx=n)) for n in cells if n >= max(config.n_parallel, _MIN_CELLS)]
    sizes = [(config.n_parallel >> i, config.n_ctx >> i) for i in range(1, _HALVINGS)]
    yield [(f"-np {n} -c {c}", replace(config, n_parallel=n, n_ctx=c)) for n, c in sizes if n and c >= _MIN_CELLS]
    if config.flash_attn != "off" and not {config.cache_type_k, config.cache_type_v} & {"q8_0", "q4_0"}:
        yield [("-ctk q8_0 -ctv q8_0", replace(config, cache_type_k="q8_0", cache_type_v="q8_0"))]
    if n_layers and config.n_gpu_layers:
        on_gpu = [n_layers * part // 8 for part in range(7, -1, -1)]
        yield [(f"-ngl {n}", replace(config, n_gpu_layers=n)) for n in on_gpu]
    steps = [config.n_batch >> i for i in range(1, _HALVINGS)]
    yield [(f"-b {n}", replace(config, n_batch=n)) for n in steps if n >= max(config.n_parallel, 64)]
