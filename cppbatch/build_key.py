"""A key for what was found out about a build of llama.cpp on this CPU: the name of the file that caches it."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def build_key(library_folder: Path) -> str:
    """A hash of the library files in this folder and the CPU."""
    files = sorted(library_folder.iterdir()) if library_folder.is_dir() else []
    stamps = [(f.name, s.st_size, s.st_mtime_ns) for f in files if (s := f.stat())]
    return hashlib.sha256(repr((str(library_folder), stamps, _cpu())).encode()).hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
