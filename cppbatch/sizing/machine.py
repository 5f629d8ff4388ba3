"""This machine: its free memory, and its description, with the software, for measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import psutil

import cppbatch
from cppbatch.config import available_threads

_CGROUPS = Path("/sys/fs/cgroup")


def free_host_memory(cgroups: Path = _CGROUPS) -> int:
    """Returns the free bytes of the system, or of the container if that has less.

    File cache and swap space count as free.
    """
    system = psutil.virtual_memory().available + psutil.swap_memory().free
    limit, used = _number(cgroups / "memory.max"), _number(cgroups / "memory.current")
    if limit is None or used is None:
        return int(system)
    return int(min(system, max(0, limit - used + _file_cache_bytes(cgroups / "memory.stat"))))


def _number(file: Path) -> int | None:
    """Returns None if there is no file, or if it contains "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _file_cache_bytes(file: Path) -> int:
    """Returns the bytes of the container's file cache."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A computer and the software measured on it."""

    cpu: str
    cores: int
    """Physical cores that this process may use."""
    memory_bytes: int
    system: str
    python: str
    cppbatch: str
    llama_cpp: str | None = None
    """llama.cpp's version and build flags; None if it was not loaded."""
    devices: tuple[str, ...] = ()
    """GPUs and their memory."""

    def line(self) -> str:
        """Returns a summary in one line."""
        where = ", ".join(self.devices) or self.cpu
        return f"{where}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB; cppbatch {self.cppbatch}"


def this_machine(*, with_llama: bool = True) -> Machine:
    """Describes this machine. `with_llama`: load llama.cpp into this process to list devices and build flags."""
    llama_cpp: str | None = None
    devices: tuple[str, ...] = ()
    if with_llama:
        from cppbatch.llama import Backend

        backend = Backend.get()
        llama_cpp = f"{backend.version}, {', '.join(backend.build_flags)}"
        devices = tuple(
            f"{device.description} ({device.memory_total / 2**30:.0f} GiB)"
            for device in backend.devices()
            if "GPU" in device.kind
        )
    return Machine(
        cpu=_cpu_name(),
        cores=available_threads(),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cppbatch=cppbatch.__version__,
        llama_cpp=llama_cpp,
        devices=devices,
    )


def _cpu_name() -> str:
    """On Linux `platform` returns only the architecture, so the name is read from /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or os.environ.get("PROCESSOR_IDENTIFIER") or platform.machine()
