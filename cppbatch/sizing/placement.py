"""Chooses the parts of a model that stay on the CPU if its devices cannot hold it, without loading it.

A step reads all of a layer's attention, dense weights and cells, but of its experts only those that its rows pick. So a
device gets the former of all layers, then the experts of as many layers as fit; without experts, the feed-forward
weights of as many layers. If that is still too much, the first layers stay on the CPU whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cppbatch.config import EngineConfig
from cppbatch.errors import ModelError
from cppbatch.models.inspect import DENSE_FFN, EXPERTS, inspect_model
from cppbatch.sizing.demand import HOST, Margin, memory_demands
from cppbatch.sizing.estimate import MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory

_SEQUENCES = 4
"""Sequences for which a model is placed if -np is not given: their cells take the place of weights."""
_TRIED = 4  # placements that are estimated at once, in one child process

Engines = Callable[[EngineConfig], list[EngineConfig]]


def placed(
    candidates: Sequence[EngineConfig], engines: Engines, *, n_devices: int, margin: Margin
) -> tuple[EngineConfig, MemoryEstimate] | None:
    """The placement with the most on the devices that leaves `margin` of their free memory free, of the largest sizes
    for which there is one; None if there is none, or if the settings say what is where (`EngineConfig.is_placed`).

    `candidates`: the sizes, largest first. `engines`: the settings of all engines. Raises `EstimateFailed`.
    """
    if candidates[0].is_placed:
        return None
    few = [each for each in candidates if each.n_parallel <= _SEQUENCES] or [candidates[-1]]
    for sizes in few:
        if found := _first_that_fits(placements(sizes, n_devices), engines, margin):
            return found
    return None


def placements(config: EngineConfig, n_devices: int = 1) -> list[EngineConfig]:
    """What may stay on the CPU, from least to all. Of several devices, each has layers of which parts do."""
    try:
        facts = inspect_model(Path(config.model_path))
    except ModelError:  # loading reports what is wrong with the file
        return []
    n = facts.n_layer or 0
    name, tensors = ("n_cpu_moe", EXPERTS) if facts.n_expert else ("n_cpu_ffn", DENSE_FFN)

    def on_cpu(layers: int, **more: Any) -> EngineConfig:
        if n_devices == 1 or layers == n:
            return replace(config, **{name: layers}, **more)
        spread = "|".join(str(i * n // layers) for i in range(layers))
        return replace(config, override_tensor=(rf"blk\.({spread}){tensors}=CPU",), **more)

    whole = [on_cpu(n, n_gpu_layers=layers) for layers in range(n, 0, -1)]
    return [*map(on_cpu, range(1, n + 1)), *whole, replace(config, n_gpu_layers=0)]


def _first_that_fits(
    ladder: Sequence[EngineConfig], engines: Engines, margin: Margin
) -> tuple[EngineConfig, MemoryEstimate] | None:
    """By trying a few evenly distributed placements at a time between those that are known to fit and not to."""
    fits: tuple[EngineConfig, MemoryEstimate] | None = None
    low, high = 0, len(ladder)  # what is before `low` does not fit, what is from `high` on does
    while low < high:
        tried = sorted({low + (high - low) * i // _TRIED for i in range(_TRIED)} | {high - 1})
        configs = [engines(ladder[i]) for i in tried]
        answer = estimate_memory([one for several in configs for one in several])
        footprints, free = iter(answer.footprints), free_host_memory()
        for i, several in zip(tried, configs, strict=True):
            estimate = MemoryEstimate([next(footprints) for _ in several], answer.devices)
            if any(each.error for each in estimate.footprints):
                return None  # as loading will report
            demands = memory_demands(estimate, free, margin=margin)
            if all(each.will_fit for each in demands):
                fits, high = (ladder[i], estimate), i
                break
            low = i + 1
            if all(each.will_fit for each in demands if each.where != HOST):
                return fits  # what is left on the CPU is too much for the host
    return fits
