"""Chooses the parts of a model that stay on the CPU if its devices cannot hold it, without loading it.

Example, experts of 16 GiB and a card with 8: all attention, dense weights and cells are on the card, with the experts
of as many layers as fit. Each number of sequences has such a placement, since their cells take the place of weights;
the chosen one has the highest speed by `--prefer`. Speeds follow from what a step reads on each side, and from the
timed kernels of each device (docs/decisions/0050).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from cppbatch.config import EngineConfig, Preference, available_threads
from cppbatch.errors import ModelError
from cppbatch.models.file_header import WEIGHT_TYPES, read_header
from cppbatch.models.find import model_parts
from cppbatch.models.inspect import DENSE_FFN, EXPERTS
from cppbatch.models.kernels import DeviceTimes, kernel_times
from cppbatch.sizing.demand import HOST, Margin, location, margin_of, memory_demands, usable
from cppbatch.sizing.device_times import CPU, device_times
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.profile import as_flags

PLACED = (
    "n_ubatch", "n_gpu_layers", "n_cpu_moe", "n_cpu_ffn", "override_tensor", "device_names", "tensor_split",
)  # fmt: skip
"""The settings that a placement chooses, besides the sizes."""
LEAST_CELLS = 4096
"""Cells of a model that its devices cannot hold, unless -c or -fitc is given; as with llama-server."""
CELLS_EACH, LEAST_CELLS_EACH = 1024, 512
"""Cells of a sequence: usually enough for a prompt and its answer; fewer than the second number are of little use."""
_OFFLOADED_ROWS = 32  # from this number on, a GPU computes with weights of the CPU that are copied to it (`op_offload`)
_FASTER_DEVICE = 1.3
"""Devices that are this much faster than others are filled first."""
_NO_TENSOR = "^$=CPU"  # an override that matches no tensor, and still counts as one
_UNKNOWN = {
    CPU: DeviceTimes({"Q8_0": {1: 0.03, 16: 0.2, 512: 6.0}}, 0.0, 0.0),
    "": DeviceTimes({"Q8_0": {1: 0.004, 16: 0.005, 512: 0.05}}, 0.05, 0.1),
}
"""A desktop's CPU and GPU, if theirs cannot be timed."""

Engines = Callable[[EngineConfig], list[EngineConfig]]
"""Returns the settings of every engine that will run, one per worker."""


class Speeds(NamedTuple):
    """What a placement is expected to reach."""

    alone: float
    """Generated tokens/s of one sequence."""
    full: float
    """Generated tokens/s of all sequences together."""
    prompt: float
    """Prompt tokens/s."""


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


class Placement(NamedTuple):
    """Settings with a placement, and their expected speeds."""

    config: EngineConfig
    speeds: Speeds
    smaller: Sequence[Callable[[], EngineConfig]]
    """The same way of placing, from a little more on the devices to as little as possible."""


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
        model = _read_model(Path(candidates[0].model_path))
    except ModelError:  # loading reports what is wrong with the file
        return []
    sizes = list(_sizes(candidates, decided))
    several = [engines(each) for each in sizes]
    one = several[0][0]
    first = estimate_memory([_without_copies(each[0], devices) for each in several]).footprints
    if any(each.error for each in first) or not (used := _used(devices, first[0])):
        return []
    share = sum(config.device == one.device for config in several[0])
    margin = margin_of(one) if margin is None else margin
    free = {each.name: usable(each, i, margin) // share for i, each in enumerate(devices) if each in used}
    search = _Search(one, model, used, free, _times(one, used, model))
    found = [each for config, footprint in zip(sizes, first, strict=True) for each in search.best(config, footprint)]
    if any(map(_is_gpu, used)):
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


def _without_copies(config: EngineConfig, devices: Sequence[Device]) -> EngineConfig:
    """The settings as llama.cpp computes with them once tensors are placed: over several devices it otherwise keeps
    copies of its buffers, to compute several ubatches at once."""
    return replace(config, override_tensor=(_NO_TENSOR,)) if len(devices) > 1 else config


def _used(devices: Sequence[Device], whole: Footprint) -> list[Device]:
    """The devices that have weights if nothing is on the CPU, in llama.cpp's order."""
    found = {location(buffer, devices) for buffer in whole.buffers if buffer.kind == "weights"}
    return [each for each in devices if each.name in found]


def _is_gpu(device: Device) -> bool:
    """Whether it is a GPU of this machine, not of an RPC worker."""
    return bool(device.description)


def _times(config: EngineConfig, used: Sequence[Device], model: _Model) -> dict[str, DeviceTimes]:
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


# --- the model -------------------------------------------------------------------------------------------------------

_Weights = Mapping[str, int]
"""{type: number of weights}."""


class _Part(NamedTuple):
    """Tensors that are placed together."""

    weights: _Weights
    n_bytes: int

    def __add__(self, other: _Part) -> _Part:  # type: ignore[override]
        return _Part(Counter(self.weights) + Counter(other.weights), self.n_bytes + other.n_bytes)


_NOTHING = _Part({}, 0)


class _Model(NamedTuple):
    """What the layers of a model consist of."""

    rest: list[_Part]
    """What is left of each layer: attention, states, norms, shared experts."""
    ffn: list[_Part]
    """The experts of each layer; without any, the feed-forward part."""
    output: _Part
    has_experts: bool
    experts: int
    """Experts of a layer; 1 without any."""
    used: int
    """Experts of a row."""
    main_types: list[str]
    """The types of most weights."""


def _read_model(path: Path) -> _Model:
    """Raises `ModelError`."""
    headers = [read_header(part) for part in model_parts(path)]
    first, tensors = headers[0], [tensor for header in headers for tensor in header.tensors]
    architecture = first.text("general.architecture") or ""
    n_layers = first.whole_number(f"{architecture}.block_count") or 0
    experts = first.whole_number(f"{architecture}.expert_count") or 0
    pattern = re.compile(EXPERTS if experts else DENSE_FFN)
    rest, ffn, output = [_NOTHING] * n_layers, [_NOTHING] * n_layers, _NOTHING
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        part = _Part({tensor.kind: tensor.n_elements} if len(tensor.shape) > 1 else {}, tensor.n_bytes)
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if layer and int(layer[1]) < n_layers:
            side = ffn if pattern.search(tensor.name) else rest
            side[int(layer[1])] += part
        elif tensor.name.startswith("output") or (tensor.name == "token_embd.weight" and "output.weight" not in names):
            output += part
    used = first.whole_number(f"{architecture}.expert_used_count") or 0
    total: Counter[str] = Counter()
    for part in (*rest, *ffn, output):
        total.update(part.weights)
    main_types = [kind for kind, _ in total.most_common(2)]  # types whose kernels are timed
    return _Model(rest, ffn, output, bool(experts), experts or 1, used or 1, main_types)


# --- the search ------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The first `whole` layers are on the CPU, and of the others the feed-forward parts of `ffn`."""

    whole: int
    ffn: int


_Layers = Mapping[str, int]
"""{device: number of layers}, the output counts as one."""


class _Search:
    """Placements of a model on devices, by calculation."""

    def __init__(
        self,
        config: EngineConfig,
        model: _Model,
        devices: Sequence[Device],
        free: Mapping[str, int],
        times: Mapping[str, DeviceTimes],
    ) -> None:
        """`free`: the bytes of each device that the engine may use."""
        self._model, self._free, self._times = model, free, times
        self._n = len(model.rest)
        self._bytes = {
            kind: _weight_bytes(kind) for part in (*model.rest, *model.ffn, model.output) for kind in part.weights
        }
        has_gpu = any(map(_is_gpu, devices))
        self._copies = has_gpu and config.op_offload and not config.no_host
        self._repacked = kernel_times(model.main_types) if config.no_host or not has_gpu else {}
        self._is_split = len(devices) > 1 and bool(config.tensor_split or config.split_mode != "layer")
        self._shares = config.tensor_split or [free[each.name] for each in devices]
        self._devices = list(devices) if self._is_split or config.device_names else self._by_speed(devices)

    def _by_speed(self, devices: Sequence[Device]) -> list[Device]:
        """The GPUs of this machine, then RPC workers; clearly faster ones first."""
        kind = self._model.main_types[0]
        ms = {each.name: self._product_ms(each.name, kind, 1) for each in devices}
        level = {name: round(math.log(each, _FASTER_DEVICE)) for name, each in ms.items()}
        return sorted(devices, key=lambda each: (not _is_gpu(each), level[each.name]))

    def best(self, config: EngineConfig, whole: Footprint) -> Iterator[Placement]:
        """The placement with the most on the devices in each of three ways, and the CPU alone.

        `whole`: the memory of `config` without a placement.
        """
        n = self._n
        ways = (
            [_Place(0, ffn) for ffn in range(n + 1)],
            [_Place(layers, 0) for layers in range(n + 1)],
            [_Place(layers, n - layers) for layers in range(n + 1)],
        )
        on_cpu = replace(config, n_gpu_layers=0)
        yield Placement(on_cpu, self._speeds(config, whole, _Place(n, 0), {}), [lambda: on_cpu])
        found: set[_Place] = set()
        for way in ways:
            filled = [(place, layers) for place in way if (layers := self._fill(config, whole, place)) is not None]
            if not filled or filled[0][0] in found:
                continue
            found.add(filled[0][0])
            # two placements with more on the device than calculated are tried
            more = way[: len(way) - len(filled)][-2:] if len(self._devices) == 1 else []
            smaller = [*((place, {}) for place in more), *filled[:1], *filled]  # the first one again, without copies
            yield Placement(
                self._settings(config, *filled[0]),
                self._speeds(config, whole, *filled[0]),
                [
                    partial(self._settings, config, place, layers, has_copies=i == len(more))
                    for i, (place, layers) in enumerate(smaller)
                ],
            )

    # --- memory -------------------------------------------------------------------------------------------------------

    def _on_cpu(self, place: _Place) -> Set[int]:
        """The layers whose feed-forward parts are on the CPU. Of several devices, the first and fastest ones have whole
        layers."""
        n = self._n - place.whole
        if len(self._devices) == 1:
            return set(range(place.whole + place.ffn))
        if self._is_split:
            return {*range(place.whole), *(place.whole + i * n // place.ffn for i in range(place.ffn))}
        return {*range(place.whole), *range(self._n - place.ffn, self._n)}

    def _fill(self, config: EngineConfig, whole: Footprint, place: _Place) -> _Layers | None:
        """The layers of each device; None if they do not fit."""
        model, on_cpu = self._model, self._on_cpu(place)
        cells = _total(whole, "cells", "states") // self._n if config.kv_offload else 0
        sizes = [
            model.rest[i].n_bytes + cells + (0 if i in on_cpu else model.ffn[i].n_bytes)
            for i in range(place.whole, self._n)
        ]
        sizes.append(model.output.n_bytes)
        fixed = max(_not_placed(whole, self._devices).values(), default=0)
        units: dict[str, int] = {}
        for i, device in enumerate(self._devices):
            room = self._free[device.name] - fixed if device.free else math.inf
            fits = sum(1 for total in accumulate(sizes) if total <= room)
            if self._is_split:
                end = round((self._n + 1 - place.whole) * sum(self._shares[: i + 1]) / sum(self._shares))
                wanted = end - sum(units.values())
                if fits < min(wanted, len(sizes)):
                    return None
                fits = wanted
            units[device.name] = fits
            sizes = sizes[fits:]
        return None if sizes else units

    def _settings(
        self, config: EngineConfig, place: _Place, units: _Layers, *, has_copies: bool = True
    ) -> EngineConfig:
        """`has_copies`: whether the model may be computed over several devices with copies of buffers."""
        n = self._n
        if not has_copies and place == (0, 0):
            config = _without_copies(config, self._devices)
        if place.whole:
            config = replace(config, n_gpu_layers=n + 1 - place.whole)
        if place.ffn == n - place.whole or len(self._devices) == 1:
            name = "n_cpu_moe" if self._model.has_experts else "n_cpu_ffn"
            config = replace(config, **{name: place.whole + place.ffn if place.ffn else 0})
        elif place.ffn:
            layers = "|".join(map(str, sorted(self._on_cpu(place))))
            tensors = EXPERTS if self._model.has_experts else DENSE_FFN
            config = replace(config, override_tensor=(rf"blk\.({layers}){tensors}=CPU",))
        if len(self._devices) > 1 and not self._is_split:
            shares = [float(units[each.name]) for each in self._devices]
            names = tuple(next(iter(each.buffer_types), each.name) for each in self._devices)
            held = [i for i, share in enumerate(shares) if share]
            shares[held[0]] -= 0.5  # llama.cpp compares sums of shares, with rounding
            shares[held[-1]] += 0.5
            config = replace(config, device_names=names, tensor_split=tuple(shares))
        return config

    # --- speeds -------------------------------------------------------------------------------------------------------

    def _speeds(self, config: EngineConfig, whole: Footprint, place: _Place, units: _Layers) -> Speeds:
        cells = _total(whole, "cells", "states") / config.n_parallel / 2  # half of those of a sequence
        on_cpu = self._on_cpu(place)
        where = [CPU] * place.whole + [each.name for each in self._devices for _ in range(units.get(each.name, 0))]
        where += [CPU] * (self._n + 1 - len(where))

        def step_ms(rows: int, n_seq: int) -> float:
            """What each side computes, one after the other, and the ways between them."""
            total, before = self._part_ms(where[-1], self._model.output, n_seq), CPU
            for i in range(self._n):
                ffn = CPU if i in on_cpu else where[i]
                total += self._part_ms(where[i], self._model.rest[i], rows)
                total += self._read_ms(where[i] if config.kv_offload else CPU, n_seq * cells / self._n)
                total += self._part_ms(ffn, self._model.ffn[i], rows, self._model.used / self._model.experts)
                total += self._way_ms(before, where[i]) + self._way_ms(where[i], ffn)
                before = ffn
            return total

        n, n_ubatch = config.n_parallel, config.n_ubatch
        return Speeds(1e3 / step_ms(1, 1), n * 1e3 / step_ms(n, n), n_ubatch * 1e3 / step_ms(n_ubatch, 1))

    def _way_ms(self, one: str, other: str) -> float:
        return 0.0 if one == other else sum(self._times[each].round_trip_ms / 2 for each in (one, other) if each != CPU)

    def _part_ms(self, where: str, part: _Part, rows: int, fraction: float = 1.0) -> float:
        """`fraction`: of the experts, those of a row."""
        chosen = 1 - (1 - fraction) ** rows  # those of any row
        copied = 0.0
        if where == CPU and self._copies and rows >= _OFFLOADED_ROWS:
            where = self._devices[0].name
            copied = self._times[where].copy_ms * part.n_bytes / 1e6
        computed = (
            n / 1e6 * self._product_ms(where, kind, rows * fraction / chosen) for kind, n in part.weights.items()
        )
        return chosen * (copied + sum(computed))

    def _product_ms(self, where: str, kind: str, rows: float) -> float:
        ms = self._times[where].product_ms(kind, rows)
        repacked = self._repacked.get(kind) if where == CPU else None
        if not repacked or not repacked.plain_ms:
            return ms
        faster = ms * repacked.rows_ms(int(rows)) / repacked.rows_ms(int(rows), plain=True)
        return max(faster, self._times[CPU].product_ms(kind, 1))  # which is the time of reading it

    def _read_ms(self, where: str, n_bytes: float) -> float:
        """Reading cells, at the speed at which weights are read."""
        kind = self._model.main_types[0]
        return self._product_ms(where, kind, 1) * n_bytes / 1e6 / self._bytes[kind]


def _weight_bytes(kind: str) -> float:
    of_kind = WEIGHT_TYPES.get(kind)
    return of_kind.n_bytes / of_kind.block if of_kind else 1.0


_PLACED = ("weights", "cells", "states")


def _total(footprint: Footprint, *kinds: str) -> int:
    return sum(each.n_bytes for each in footprint.buffers if each.kind in kinds and not each.owner)


def _not_placed(footprint: Footprint, devices: Sequence[Device]) -> Counter[str]:
    """The bytes of each device for what is there wherever the model is: compute buffers, a draft model, a projector."""
    found: Counter[str] = Counter()
    for buffer in footprint.buffers:
        if (buffer.owner or buffer.kind not in _PLACED) and (where := location(buffer, devices)) != HOST:
            found[where] += buffer.n_bytes
    return found
