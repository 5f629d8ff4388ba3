"""Reads a job's input file, of any format: in order, in constant memory; an invalid line affects no other line."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Protocol

import numpy as np

from cppbatch.jobs.input.files import FilesInput
from cppbatch.jobs.input.format import InputFormat
from cppbatch.jobs.input.lines import LineInput, parse_json_line, parse_text_line
from cppbatch.jobs.input.parquet import ParquetInput
from cppbatch.jobs.input.request_builder import LineError, RequestBuilder, row_id
from cppbatch.jobs.input.tables import CsvInput
from cppbatch.jobs.job_request import JobRequest, RejectedLine, hash64


class InputReader:
    """Iterating yields the request of each line, or the rejected line with the reason. Blank lines are skipped.

    `urls` are the allowed endpoints. Each iteration opens the file again. Raises `ConfigError` if the file cannot be
    read or a table lacks its columns. The ledger, not the reader, checks that custom IDs are unique.
    """

    def __init__(self, input_format: InputFormat, urls: Collection[str]) -> None:
        self._format = input_format
        self._builder = RequestBuilder(input_format, urls)
        self._source: _Source | None = None

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        self.close()
        self._source = self._open()
        yield from self._source
        self.close()

    def first(self) -> JobRequest | RejectedLine | None:
        """The first entry; None for a file without entries. Raises `ConfigError` if the file cannot be read or a table
        lacks its columns."""
        entry = next(iter(self), None)
        self.close()
        return entry

    def count(self, is_stopped: Callable[[], bool] = lambda: False) -> int | None:
        """The number of entries that iterating yields; None if stopped. Opens the file again. Thread-safe."""
        source, n = self._open(), 0
        try:
            for more in source.count():
                n += more
                if is_stopped():
                    return None
        finally:
            source.close()
        return n

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __enter__(self) -> InputReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def id_problem(self) -> str | None:
        """Why the column `id`, which was not asked for, cannot name the results; None if it can or does not.

        Reads the file, in 16 bytes of memory for each row.
        """
        if self._format.id_column is not None or self._format.kind in ("txt", "files"):
            return None
        lines, hashes = array("q"), array("q")
        with contextlib.closing(self._open()) as source:
            try:
                for line, value in source.ids():
                    if value is not None and (not isinstance(value, str) or value.strip()):
                        hashes.append(hash64(row_id("id", value).encode()))
                        lines.append(line)
            except LineError as error:
                return str(error)
        order = np.argsort(np.array(hashes), kind="stable")
        same = np.flatnonzero(np.diff(np.array(hashes)[order]) == 0)[:1]
        return "".join(f"lines {lines[order[i]]} and {lines[order[i + 1]]} have the same" for i in same) or None

    def _open(self) -> _Source:
        if self._format.kind == "files":
            return FilesInput(self._format, self._builder)
        if self._format.kind == "csv":
            return CsvInput(self._format, self._builder)
        if self._format.kind == "parquet":
            return ParquetInput(self._format, self._builder)
        parse = parse_json_line if self._format.kind == "jsonl" else parse_text_line
        return LineInput(self._format, self._builder, parse)


class _Source(Protocol):
    """An open input file."""

    def count(self) -> Iterator[int]: ...
    def ids(self) -> Iterator[tuple[int, object]]: ...
    def __iter__(self) -> Iterator[JobRequest | RejectedLine]: ...
    def close(self) -> None: ...
