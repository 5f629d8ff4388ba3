"""Refuses settings that will not fit, before a model is loaded, and says which ones would."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from cppbatch.bench.memory.memory_demand import HOST, Demand, format_gib, free_host_memory, memory_demands, where
from cppbatch.bench.memory.memory_estimate import Footprint, MemoryEstimate, estimate_memory
from cppbatch.bench.memory.weights import MAPPED
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, EstimateFailed

log = logging.getLogger("cppbatch.memory")

Engines = Callable[[EngineConfig], list[EngineConfig]]
"""The settings of every engine that will run; several workers with a copy each."""

_FEWEST_CELLS = 512
_HALVINGS = 12
_INSIST = "If this is wrong, --no-memory-check (CPPBATCH_MEMORY_CHECK=0) leaves out this check"


def check_memory(config: EngineConfig, engines: Engines = lambda config: [config]) -> None:
    """Raises `ConfigError` when these engines cannot have the memory that they need.

    Never stops what would load for a reason of its own: when the estimate fails, a warning says why.
    """
    try:
        found = estimate_memory(engines(config))
    except EstimateFailed as error:
        log.warning("whether the model fits into memory was not checked: %s", error)
        return
    if failed := next((each.error for each in found.footprints if each.error), None):
        log.info("whether the model fits into memory was not checked: %s", failed)  # loading it will say so too
        return
    needed = memory_demands(found, free_host_memory())
    if short := [each for each in needed if not each.will_fit]:
        raise ConfigError(_refusal(config, short, found, engines))
    for each in needed:
        if each.will_be_slow:
            log.warning(
                "the weights will not stay in memory: %s are free, %s needed beside %s of weights, and these will be "
                "read from the file again and again. Take a smaller model, or lower -c or -np",
                *map(format_gib, (each.free, each.firm, each.mapped)),
            )


def _refusal(config: EngineConfig, short: list[Demand], found: MemoryEstimate, engines: Engines) -> str:
    worst = max(short, key=lambda each: each.firm - each.free)
    place = "the host's memory" if worst.where == HOST else worst.where
    workers = f" by {len(found.footprints)} workers" if len(found.footprints) > 1 else ""
    message = (
        f"-c {config.n_ctx} -np {config.n_parallel} needs {format_gib(worst.firm)} of {place}{workers} "
        f"({_parts(found.footprints[0], worst.where, found)}), and {format_gib(worst.free)} are free there"
    )
    fitting = _that_fit(config, worst.where, found, engines)
    advice = f"It would fit with {', or with '.join(fitting)}" if fitting else "Take a smaller model or quantisation"
    return f"{message}. {advice}. {_INSIST}"


def _parts(footprint: Footprint, where_: str, found: MemoryEstimate) -> str:
    there = [b for b in footprint.buffers if b.place != MAPPED and where(b, found.devices) == where_]
    largest = sorted(there, key=lambda buffer: -buffer.n_bytes)[:3]
    return ", ".join(f"{buffer.kind} {format_gib(buffer.n_bytes)}" for buffer in largest)


def _that_fit(config: EngineConfig, place: str, found: MemoryEstimate, engines: Engines) -> list[str]:
    """Of each kind of change the smallest one that helps, as flags."""
    groups = list(alternatives(config, n_layers=found.footprints[0].n_layers if place != HOST else 0))
    asked = [engines(changed) for group in groups for _, changed in group]
    try:
        answers = iter(estimate_memory([one for several in asked for one in several]).footprints)
    except EstimateFailed as error:
        log.info("what would fit was not found out: %s", error)
        return []
    free = free_host_memory()
    fits: dict[EngineConfig, bool] = {}
    for (_, changed), several in zip((each for group in groups for each in group), asked, strict=True):
        parts = [next(answers) for _ in several]
        needed = memory_demands(MemoryEstimate(parts, found.devices), free)
        fits[changed] = all(each.will_fit for each in needed) and not any(part.error for part in parts)
    return [flags for group in groups if (flags := next((f for f, changed in group if fits[changed]), None))]


def alternatives(config: EngineConfig, *, n_layers: int = 0) -> Iterator[list[tuple[str, EngineConfig]]]:
    """Settings that take less: flags and what they make of `config`, in groups, each from more to less.

    `n_layers`: of the model, if fewer of them on the GPU may help.
    """
    cells = [config.n_ctx >> i for i in range(1, _HALVINGS)]
    yield [(f"-c {n}", replace(config, n_ctx=n)) for n in cells if n >= max(config.n_parallel, _FEWEST_CELLS)]
    sizes = [(config.n_parallel >> i, config.n_ctx >> i) for i in range(1, _HALVINGS)]
    yield [(f"-np {n} -c {c}", replace(config, n_parallel=n, n_ctx=c)) for n, c in sizes if n and c >= _FEWEST_CELLS]
    if config.flash_attn != "off" and not {config.cache_type_k, config.cache_type_v} & {"q8_0", "q4_0"}:
        yield [("-ctk q8_0 -ctv q8_0", replace(config, cache_type_k="q8_0", cache_type_v="q8_0"))]
    if n_layers and config.n_gpu_layers:
        on_gpu = [n_layers * part // 8 for part in range(7, -1, -1)]
        yield [(f"-ngl {n}", replace(config, n_gpu_layers=n)) for n in on_gpu]
    steps = [config.n_batch >> i for i in range(1, _HALVINGS)]
    yield [(f"-b {n}", replace(config, n_batch=n)) for n in steps if n >= max(config.n_parallel, 64)]
