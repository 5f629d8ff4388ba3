"""Which files a command may write to, and how: devices, pipes and models are never deleted or replaced."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from pathlib import Path

STANDARD_STREAM = Path("-")
"""Standard input as the input of a command, standard output as its output."""

_OPEN_FILES = re.compile(r"/dev/(stdin|stdout|stderr|fd/\d+)|/proc/(self|\d+)/fd/\d+")
_GGUF = b"GGUF"


def is_special(path: Path) -> bool:
    """Whether this is neither a regular file nor a folder, but a device, a pipe or a socket. Follows links."""
    mode = _mode(path)
    return mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def is_stream(path: Path) -> bool:
    """Whether data written there passes on: standard output, an open file by its number, a pipe, a character device."""
    mode = _mode(path)
    passes_on = mode is not None and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))
    return passes_on or path == STANDARD_STREAM or bool(_OPEN_FILES.fullmatch(os.path.abspath(path)))


def is_model(path: Path) -> bool:
    """Whether this is a regular file in the GGUF format."""
    try:
        with open_regular(path) as file:
            return file.read(len(_GGUF)) == _GGUF
    except (OSError, ValueError):
        return False


def is_same_file(one: Path, other: Path) -> bool:
    """Whether both paths lead to the same file, also through links and hard links."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and one.samefile(other)


def open_regular(path: Path, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Opens a file for reading.

    Raises `OSError`, also if it is a pipe or a device, and `ValueError` for an invalid path.
    """
    refuse_special(path)  # opening a pipe would wait for its writer
    return io.BufferedReader(io.FileIO(path), buffer_bytes)


def refuse_special(path: Path) -> None:
    """Raises `OSError` if this is a device, a pipe or a socket."""
    if is_special(path):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def replace_file(finished: Path, path: Path) -> None:
    """Renames `finished` to `path`. A link at `path` stays, and its file is replaced.

    Raises `OSError`, also if `path` is a device or a pipe.
    """
    refuse_special(path)
    finished.replace(Path(os.path.realpath(path)))


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # ValueError: a null byte
        return None
