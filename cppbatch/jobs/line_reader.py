"""Reads a file line by line with bounded memory, whatever the length of the file and of its lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from cppbatch.errors import ConfigError

MAX_LINE_BYTES = 16 << 20
"""Without the line end. A longer line indicates a broken file rather than a request."""

_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 18


class LineReader:
    """Opens a file. Iterating yields (line number from 1, line with its line end).

    A line longer than `MAX_LINE_BYTES` is truncated, but stays longer than `MAX_LINE_BYTES`, so that the caller can
    detect it. A UTF-8 byte order mark at the start is skipped. Raises `ConfigError` if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = io.BufferedReader(io.FileIO(path), _READ_BYTES)
        except (OSError, ValueError) as error:  # ValueError: an invalid path, for example with a null byte
            raise unreadable_file(path, error) from None
        self._path = path

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        try:
            yield from self._lines()
        except OSError as error:
            raise unreadable_file(self._path, error) from error

    def close(self) -> None:
        self._file.close()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        file = self._file
        if file.peek(len(_BOM)).startswith(_BOM):
            file.read(len(_BOM))
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                self._skip_line()
            yield number, line

    def _skip_line(self) -> None:
        while piece := self._file.readline(_READ_BYTES):
            if piece.endswith(b"\n"):
                return


def unreadable_file(path: Path, error: Exception) -> ConfigError:
    """The `ConfigError` for an input file that cannot be opened or read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"{path}: cannot be read: {reason}")
