"""Placements of a model on devices, by calculation: what fits, and how fast it is."""

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

from cppbatch.config import EngineConfig
from cppbatch.models.file_header import WEIGHT_TYPES, read_header
from cppbatch.models.find import model_parts
from cppbatch.models.inspect import DENSE_FFN, EXPERTS
from cppbatch.models.kernels import DeviceTimes, kernel_times
from cppbatch.sizing.demand import HOST, location
from cppbatch.sizing.device_times import CPU
from cppbatch.sizing.estimate import Device, Footprint

_OFFLOADED_ROWS = 32  # from this number on, a GPU computes with weights of the CPU that are copied to it (`op_offload`)
_FASTER_DEVICE = 1.3
"""Devices that are this much faster than others are filled first."""
_NO_TENSOR = "^$=CPU"  # an override that matches no tensor, and still counts as one


class Speeds(NamedTuple):
    """What a placement is expected to reach."""

    alone: float
    """Generated tokens/s of one sequence."""
    full: float
    """Generated tokens/s of all sequences together."""
    prompt: float
    """Prompt tokens/s."""


class Placement(NamedTuple):
    """Settings with a placement, and their expected speeds."""

    config: EngineConfig
    speeds: Speeds
    smaller: Sequence[Callable[[], EngineConfig]]
    """The same way of placing, from a little more on the devices to as little as possible."""


def without_copies(config: EngineConfig, devices: Sequence[Device]) -> EngineConfig:
    """The settings as llama.cpp computes with them once tensors are placed: over several devices it otherwise keeps
    copies of its buffers, to compute several ubatches at once."""
    return replace(config, override_tensor=(_NO_TENSOR,)) if len(devices) > 1 else config


def is_gpu(device: Device) -> bool:
    """Whether it is a GPU of this machine, not of an RPC worker."""
    return bool(device.description)


_Weights = Mapping[str, int]
"""{type: number of weights}."""


class _Part(NamedTuple):
    """Tensors that are placed together."""

    weights: _Weights
    n_bytes: int

    def __add__(self, other: _Part) -> _Part:  # type: ignore[override]
        return _Part(Counter(self.weights) + Counter(other.weights), self.n_bytes + other.n_bytes)


_NOTHING = _Part({}, 0)


class Model(NamedTuple):
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


def read_model(path: Path) -> Model:
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
    return Model(rest, ffn, output, bool(experts), experts or 1, used or 1, main_types)


class _Place(NamedTuple):
    """The first `whole` layers are on the CPU, and of the others the feed-forward parts of `ffn`."""

    whole: int
    ffn: int


_Layers = Mapping[str, int]
"""{device: number of layers}, the output counts as one."""


class Search:
    """Placements of a model on devices, by calculation."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
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
        has_gpu = any(map(is_gpu, devices))
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
        return sorted(devices, key=lambda each: (not is_gpu(each), level[each.name]))

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
            config = without_copies(config, self._devices)
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
