"""Chooses the parts of a model that stay on the CPU if its devices cannot hold it, without loading it.

Example, experts of 16 GiB and a card with 8: all attention, dense weights and cells are on the card, with the experts
of as many layers as fit. Each number of sequences has such a placement, since their cells take the place of weights;
the chosen one has the highest speed by `--prefer`. Speeds follow from what a step reads on each side, and from the
timed kernels of each device (docs/decisions/0050).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from cppbatch.config import EngineConfig, Preference, available_threads
from cppbatch.errors import ModelError
from cppbatch.models.kernels import DeviceTimes
from cppbatch.sizing.demand import HOST, Margin, location, margin_of, memory_demands, usable
from cppbatch.sizing.device_times import CPU, device_times
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.placement_search import Model, Placement, Search, Speeds, is_gpu, read_model, without_copies
from cppbatch.sizing.profile import as_flags

PLACED = (
    "n_ubatch", "n_gpu_layers", "n_cpu_moe", "n_cpu_ffn", "override_tensor", "device_names", "tensor_split",
)  # fmt: skip
"""The settings that a placement chooses, besides the sizes."""
LEAST_CELLS = 4096
"""Cells of a model that its devices cannot hold, unless -c or -fitc is given; as with llama-server."""
CELLS_EACH, LEAST_CELLS_EACH = 1024, 512
"""Cells of a sequence: usually enough for a prompt and its answer; fewer than the second number are of little use."""
_UNKNOWN = {
    CPU: DeviceTimes({"Q8_0": {1: 0.03, 16: 0.2, 512: 6.0}}, 0.0, 0.0),
    "": DeviceTimes({"Q8_0": {1: 0.004, 16: 0.005, 512: 0.05}}, 0.05, 0.1),
}
"""A desktop's CPU and GPU, if theirs cannot be timed."""
Engines = Callable[[EngineConfig], list[EngineConfig]]
"""Returns the settings of every engine that will run, one per worker."""


def scores(among: Sequence[Speeds], prefer: Preference) -> list[float]:
    """A number for each, higher is better: the speed of one sequence for latency, of all together for throughput; for
    balanced that of all together where one sequence has at least 80% of the best speed. Prompts count too, one token
    for each generated one."""
    alone = [1 / (1 / each.alone + 1 / each.prompt) for each in among]
    full = [1 / (1 / each.full + 1 / each.prompt) for each in among]
    if prefer == "latency":
        return alone
    # `balanced` keeps 80% of the best speed of one sequence
    least = 0.8 * max(alone, default=0.0) if prefer == "balanced" else 0.0
    return [both if one >= least else one / 1e6 for one, both in zip(alone, full, strict=True)]


def describe_speeds(config: EngineConfig, speeds: Speeds) -> str:
    """One line for people: what `config` is expected to reach."""
    several = f", {speeds.full:.3g} for {config.n_parallel} together" if config.n_parallel > 1 else ""
    return f"expects {speeds.alone:.3g} tokens/s for one sequence{several}, {speeds.prompt:.3g} of prompts"


def placement_flags(config: EngineConfig) -> str:
    """The flags that give this placement."""
    usual = EngineConfig(config.model_path)
    names = ("n_parallel", "n_ctx", *(name for name in PLACED if getattr(config, name) != getattr(usual, name)))
    return as_flags({name: getattr(config, name) for name in names})


def describe_placements(
    candidates: Sequence[EngineConfig],
    devices: Sequence[Device],
    decided: Set[str],
) -> list[str]:
    """A line for each number of sequences of a model that its devices cannot hold: flags, and the speeds to expect.

    Calculated, so whether they fit is not checked. Arguments and errors as of `placements`.
    """
    lines: dict[int, str] = {}
    for each in ranked(candidates, lambda one: [one], devices, decided):
        sizes = each.config.n_parallel
        if sizes not in lines:
            lines[sizes] = f"{placement_flags(each.config)}: {describe_speeds(each.config, each.speeds)}"
    return [lines[n] for n in sorted(lines)]


class Placed(NamedTuple):
    """A placement that fits."""

    config: EngineConfig
    estimate: MemoryEstimate
    speeds: Speeds


def placements(
    candidates: Sequence[EngineConfig],
    engines: Engines,
    devices: Sequence[Device],
    decided: Set[str] = frozenset(),
    *,
    margin: Margin | None = None,
) -> Iterator[Placed]:
    """The placements that leave the devices' `margin` of free memory, fastest first by `config.prefer`; none if the
    settings say what is where (`EngineConfig.is_placed`). Each takes estimates, in seconds.

    `candidates`: the sizes that would be chosen if the model fitted, largest first. `engines`: the settings of all
    engines. `decided`: the names of settings that may not change. `margin`: None for `margin_of` the settings. Raises
    `EstimateFailed`.
    """
    margin = margin_of(candidates[0]) if margin is None else margin
    for each in ranked(candidates, engines, devices, decided, margin=margin):
        if fitting := _first_that_fits(each.smaller, engines, margin):
            yield Placed(*fitting, each.speeds)


def ranked(
    candidates: Sequence[EngineConfig],
    engines: Engines,
    devices: Sequence[Device],
    decided: Set[str] = frozenset(),
    *,
    margin: Margin | None = None,
) -> list[Placement]:
    """The best placements of each number of sequences, fastest first, by calculation: whether they fit is not checked.

    Arguments and errors as of `placements`.
    """
    if not devices or candidates[0].is_placed:
        return []
    try:
        model = read_model(Path(candidates[0].model_path))
    except ModelError:  # loading reports what is wrong with the file
        return []
    sizes = list(_sizes(candidates, decided))
    several = [engines(each) for each in sizes]
    one = several[0][0]
    first = estimate_memory([without_copies(each[0], devices) for each in several]).footprints
    if any(each.error for each in first) or not (used := _used(devices, first[0])):
        return []
    share = sum(config.device == one.device for config in several[0])
    margin = margin_of(one) if margin is None else margin
    free = {each.name: usable(each, i, margin) // share for i, each in enumerate(devices) if each in used}
    search = Search(one, model, used, free, _times(one, used, model))
    found = [each for config, footprint in zip(sizes, first, strict=True) for each in search.best(config, footprint)]
    if any(map(is_gpu, used)):
        return _in_order(found, one.prefer)
    last = [each for each in found if each.config.n_gpu_layers == 0]  # RPC workers are given to be used
    return [*_in_order([each for each in found if each not in last], one.prefer), *_in_order(last, one.prefer)]


def _in_order(found: Sequence[Placement], prefer: Preference) -> list[Placement]:
    """The best first; of those that are about as good, more sequences first."""
    scored = list(zip(scores([each.speeds for each in found], prefer), found, strict=True))
    # within 2% of the best speed, more sequences are better
    near = max((score for score, _ in scored), default=0.0) * 0.98
    scored.sort(key=lambda each: (each[0] >= near and each[1].config.n_parallel, each[0]), reverse=True)
    return [each for _, each in scored]


def _sizes(candidates: Sequence[EngineConfig], decided: Set[str]) -> Iterator[EngineConfig]:
    """Numbers of sequences, with the fewest useful cells unless -c is given, and two sizes of a ubatch."""
    is_given = len({each.n_ctx for each in candidates}) == 1
    most = max(each.n_ctx for each in candidates)
    for config in {each.n_parallel: each for each in candidates}.values():
        cells = (
            config.n_ctx
            if is_given
            else max(config.fit_ctx, min(most, max(LEAST_CELLS, CELLS_EACH * config.n_parallel)))
        )
        yield replace(config, n_ctx=cells)
        if "n_ubatch" not in decided and config.op_offload and config.n_ubatch < config.n_batch:
            # weights on the CPU are read once for 2048 prompt tokens
            yield replace(config, n_ctx=cells, n_ubatch=min(2048, config.n_batch))


def _used(devices: Sequence[Device], whole: Footprint) -> list[Device]:
    """The devices that have weights if nothing is on the CPU, in llama.cpp's order."""
    found = {location(buffer, devices) for buffer in whole.buffers if buffer.kind == "weights"}
    return [each for each in devices if each.name in found]


def _times(config: EngineConfig, used: Sequence[Device], model: Model) -> dict[str, DeviceTimes]:
    n_threads = config.n_threads or available_threads()
    times = device_times(config, used, model.main_types, n_threads=n_threads)
    return times or {CPU: _UNKNOWN[CPU], **{each.name: _UNKNOWN[""] for each in used}}


def _first_that_fits(
    ladder: Sequence[Callable[[], EngineConfig]], engines: Engines, margin: Margin
) -> tuple[EngineConfig, MemoryEstimate] | None:
    """By estimates of a few placements at a time: the first ones, then ever further ones."""
    fits: tuple[EngineConfig, MemoryEstimate] | None = None
    low, high = 0, len(ladder)  # what is before `low` does not fit, what is from `high` on does
    while low < high:
        tried = sorted({min(low + step, high - 1) for step in _STEPS})
        chosen = [ladder[i]() for i in tried]
        configs = [engines(each) for each in chosen]
        answer = estimate_memory([one for several in configs for one in several])
        footprints, free = iter(answer.footprints), free_host_memory()
        for i, config, several in zip(tried, chosen, configs, strict=True):
            estimate = MemoryEstimate([next(footprints) for _ in several], answer.devices)
            if any(each.error for each in estimate.footprints):
                return None  # as loading will report
            demands = memory_demands(estimate, free, margin=margin)
            if all(each.will_fit for each in demands):
                fits, high = (config, estimate), i
                break
            low = i + 1
            if all(each.will_fit for each in demands if each.where != HOST):
                return fits  # what is left on the CPU is too much for the host
    return fits


_STEPS = (0, 1, 2, 4, 12)
