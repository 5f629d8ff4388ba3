"""Hidden folders for files that are not complete yet. What a killed process has left is removed by the next one."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

_HOST = re.sub(r"\W", "_", platform.node())
_CLOCK_S = 60.0  # the times of processes follow changes of the clock


@contextlib.contextmanager
def part_folder(parent: Path) -> Iterator[Path]:
    """A new hidden folder in `parent`, removed at the end. A file in it can be renamed into `parent`, being complete.

    Its name says which process of which machine it belongs to. Raises OSError.
    """
    remove_stale(parent)
    prefix = f".cppbatch-part-{_HOST}-{os.getpid()}-{int(psutil.Process().create_time())}-"
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        yield Path(folder)


def remove_stale(parent: Path) -> None:
    """Removes the part folders in `parent` of processes of this machine that have ended."""
    name = re.compile(rf"\.cppbatch-part-{_HOST}-(\d+)-(\d+)-\w+")
    for path in parent.glob(".cppbatch-part-*") if os.path.isdir(parent) else ():
        if (found := name.fullmatch(path.name)) and not _runs(int(found[1]), int(found[2])):
            shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int, created: int) -> bool:
    """Whether the process that began at this time still runs; another one may have its id."""
    try:
        began: float = psutil.Process(pid).create_time()
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
    return abs(began - created) < _CLOCK_S
