"""Reads a job's input file, of any format: in order, in constant memory; an invalid line affects no other line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Protocol

from cppbatch.jobs.csv_input import CsvInput
from cppbatch.jobs.input_format import InputFormat
from cppbatch.jobs.job_request import JobRequest, RejectedLine
from cppbatch.jobs.jsonl_input import LineInput, parse_json_line, parse_text_line
from cppbatch.jobs.parquet_input import ParquetInput
from cppbatch.jobs.request_builder import RequestBuilder


class InputReader:
    """Iterating yields the request of each line, or why the line is rejected. Blank lines are skipped.

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

    def check(self) -> None:
        """Reads the first line. Raises `ConfigError` if the file cannot be read or a table lacks its columns."""
        next(iter(self), None)
        self.close()

    def count(self, is_stopped: Callable[[], bool] = lambda: False) -> int | None:
        """How many entries iterating yields; None: stopped. Opens the file again. Any thread may call this."""
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

    def _open(self) -> _Source:
        if self._format.kind == "csv":
            return CsvInput(self._format, self._builder)
        if self._format.kind == "parquet":
            return ParquetInput(self._format, self._builder)
        parse = parse_json_line if self._format.kind == "jsonl" else parse_text_line
        return LineInput(self._format, self._builder, parse)


class _Source(Protocol):
    """An open input file."""

    def count(self) -> Iterator[int]: ...
    def __iter__(self) -> Iterator[JobRequest | RejectedLine]: ...
    def close(self) -> None: ...
