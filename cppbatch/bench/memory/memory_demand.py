"""What engines need, held against what is free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from cppbatch.bench.memory.buffers import Buffer
from cppbatch.bench.memory.memory_estimate import Device, Footprint, MemoryEstimate
from cppbatch.bench.memory.weights import MAPPED

_CGROUPS = Path("/sys/fs/cgroup")


def free_host_memory(cgroups: Path = _CGROUPS) -> int:
    """Bytes that processes can still have: the system's, or a container's where that has less.

    What caches files counts as free, and so does swap space.
    """
    system = psutil.virtual_memory().available + psutil.swap_memory().free
    limit, used = _number(cgroups / "memory.max"), _number(cgroups / "memory.current")
    if limit is None or used is None:
        return int(system)
    return int(min(system, max(0, limit - used + _cached(cgroups / "memory.stat"))))


def _number(file: Path) -> int | None:
    """None without such a file, and where it says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _cached(file: Path) -> int:
    """Bytes of files that a container keeps in memory and would give up."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


HOST = "host"
_GIB = 2**30


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What engines need in one place: the host's memory, or a GPU's. In bytes."""

    where: str
    """`HOST`, or llama.cpp's name of the device."""
    free: int
    """0 on a device whose driver does not tell."""
    firm: int
    """What must be there: buffers, processes."""
    mapped: int = 0
    """Weights used as they lie in the file: where memory is short they are read again and again, which is slow."""

    @property
    def will_fit(self) -> bool:
        """Whether it can be allocated; unknown counts as yes."""
        return self.firm <= self.free or (self.free == 0 and self.where != HOST)

    @property
    def will_be_slow(self) -> bool:
        """Whether the weights would not stay in memory."""
        return self.will_fit and self.firm + self.mapped > self.free > 0


def memory_demands(survey: MemoryEstimate, host_free: int) -> list[Demand]:
    """What all engines of a survey need together, the host first.

    Processes share the pages of a file that they map. `host_free`: bytes.
    """
    buffers = [buffer for footprint in survey.footprints for buffer in footprint.buffers]
    host = Demand(
        where=HOST,
        free=host_free,
        firm=sum(b.n_bytes for b in buffers if where(b, survey.devices) == HOST and b.place != MAPPED),
        mapped=max((mapped_bytes(footprint) for footprint in survey.footprints), default=0),
    )
    on_devices = [
        Demand(
            where=device.name,
            free=device.free,
            firm=sum(b.n_bytes for b in buffers if where(b, survey.devices) == device.name),
        )
        for device in survey.devices
    ]
    return [host, *(each for each in on_devices if each.firm)]


def mapped_bytes(footprint: Footprint) -> int:
    """Its weights that are used as they lie in the file."""
    return sum(buffer.n_bytes for buffer in footprint.buffers if buffer.place == MAPPED)


def where(buffer: Buffer, devices: Sequence[Device]) -> str:
    """In whose memory a buffer is. Behind a device's name there may be what kind of buffer it is (Metal's)."""
    return next((d.name for d in devices if buffer.place == d.name or buffer.place.startswith(f"{d.name}_")), HOST)


def format_gib(n_bytes: int) -> str:
    """For messages."""
    return f"{n_bytes / _GIB:.2f} GiB" if n_bytes >= _GIB / 10 else f"{n_bytes / 2**20:.1f} MiB"
