"""Free memory of the host."""

from __future__ import annotations

from pathlib import Path

import psutil

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
