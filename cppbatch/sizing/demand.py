"""The memory that engines need, compared with free memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.sizing.buffers import MAPPED, Buffer
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate

HOST = "host"
MARGIN = 0.1
"""The fraction of free memory that chosen settings leave free."""
_GIB, _MIB = 2**30, 2**20

Margin = float | Sequence[int]
"""What must stay free: a fraction of the free memory, or MiB of each device (`EngineConfig.fit_target`), where one
number is for all devices, or without a device for the host; anywhere else `MARGIN`."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that engines need on the host or on one GPU, in bytes."""

    where: str
    """`HOST`, or llama.cpp's name of the device."""
    free: int
    """0 if the driver does not report it."""
    firm: int
    """Memory that must be allocated: buffers and processes."""
    mapped: int = 0
    """Weights mapped from the file. If memory is short, they are read from the file repeatedly, which is slow."""
    margin: float = 0.0
    """The fraction of free memory that must stay free: 0 to 1."""

    @property
    def will_fit(self) -> bool:
        """Whether the memory can be allocated. True if free memory is unknown."""
        return self.firm <= self.free * (1 - self.margin) or (self.free == 0 and self.where != HOST)

    @property
    def will_be_slow(self) -> bool:
        """Whether the mapped weights do not fit into memory as well."""
        return self.will_fit and self.firm + self.mapped > self.free > 0


def memory_demands(estimate: MemoryEstimate, host_free: int, *, margin: Margin = 0.0) -> list[Demand]:
    """Returns what all engines of an estimate need together, the host first.

    `host_free`: bytes. Processes share the pages of a mapped file, so mapped weights count once.
    """
    buffers = [buffer for footprint in estimate.footprints for buffer in footprint.buffers]
    host = Demand(
        where=HOST,
        free=host_free,
        firm=sum(b.n_bytes for b in buffers if location(b, estimate.devices) == HOST and b.buffer_type != MAPPED),
        mapped=max((mapped_bytes(footprint) for footprint in estimate.footprints), default=0),
        margin=MARGIN if estimate.devices and not isinstance(margin, float) else _fraction(margin, 0, host_free),
    )
    on_devices = [
        Demand(
            where=device.name,
            free=device.free,
            firm=sum(b.n_bytes for b in buffers if location(b, estimate.devices) == device.name),
            margin=_fraction(margin, i, device.free),
        )
        for i, device in enumerate(estimate.devices)
    ]
    return [host, *(each for each in on_devices if each.firm)]


def _fraction(margin: Margin, i: int, free: int) -> float:
    """The fraction of the `i`-th device's free memory that must stay free."""
    if isinstance(margin, float):
        return margin
    mib = margin[0] if len(margin) == 1 else margin[i] if i < len(margin) else None
    return MARGIN if mib is None or not free else min(1.0, mib * _MIB / free)


def margin_of(config: EngineConfig) -> Margin:
    """What the chosen settings leave free."""
    return config.fit_target or MARGIN


def usable(device: Device, i: int, margin: Margin) -> int:
    """The bytes of the `i`-th device that may be used."""
    return int(device.free * (1 - _fraction(margin, i, device.free)))


def mapped_bytes(footprint: Footprint) -> int:
    """Returns the bytes of weights mapped from the file."""
    return sum(buffer.n_bytes for buffer in footprint.buffers if buffer.buffer_type == MAPPED)


def location(buffer: Buffer, devices: Sequence[Device]) -> str:
    """Returns `HOST` or the name of the device that holds a buffer.

    A buffer type may be a device's name with a suffix (on Metal).
    """
    return next(
        (d.name for d in devices if any(_is_of(buffer.buffer_type, kind) for kind in d.buffer_types or [d.name])), HOST
    )


def _is_of(buffer_type: str, name: str) -> bool:
    return buffer_type == name or buffer_type.startswith(f"{name}_")


def format_gib(n_bytes: int) -> str:
    """Formats bytes for messages, in GiB or MiB."""
    return f"{n_bytes / _GIB:.2f} GiB" if n_bytes >= _GIB / 10 else f"{n_bytes / 2**20:.1f} MiB"
