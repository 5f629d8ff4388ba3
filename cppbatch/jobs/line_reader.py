"""The lines of a file, one at a time, however long the file and its lines are."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

from cppbatch.errors import ConfigError

MAX_LINE_BYTES = 16 << 20
"""In bytes, without its end. A longer one is no request but a broken file."""

_BOM = b"\xef\xbb\xbf"
_READ_AT_ONCE = 1 << 18


class LineReader:
    """Opens a file; iterating it yields (line number from 1, the line with its end).

    A line longer than `MAX_LINE_BYTES` comes cut, and is known by still being longer than that. A UTF-8 byte order mark
    at the start is dropped. Raises `ConfigError` if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.bytes_read = 0
        """All that was handed out or skipped so far."""
        try:
            self._file = io.BufferedReader(io.FileIO(path), _READ_AT_ONCE)
        except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
            raise unreadable_file(path, error) from None
        self._path = path
        self._size = os.fstat(self._file.fileno()).st_size

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        try:
            yield from self._lines()
        except OSError as error:
            raise unreadable_file(self._path, error) from error

    @property
    def fraction(self) -> float:
        """How much of the file is read, from 0 to 1."""
        return min(self.bytes_read / self._size, 1.0) if self._size else 0.0

    def close(self) -> None:
        self._file.close()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        file = self._file
        if file.peek(len(_BOM)).startswith(_BOM):
            self.bytes_read += len(file.read(len(_BOM)))
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            self.bytes_read += len(line)
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                self._skip_line()
            yield number, line

    def _skip_line(self) -> None:
        while piece := self._file.readline(_READ_AT_ONCE):
            self.bytes_read += len(piece)
            if piece.endswith(b"\n"):
                return


def unreadable_file(path: Path, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"{path}: cannot be read: {reason}")
