"""Reading a job's input: in order, in constant memory, and what is wrong with a line is wrong with that line alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Protocol

from cppbatch.jobs.csv_input import CsvInput
from cppbatch.jobs.hashing import hash64
from cppbatch.jobs.input_format import InputFormat
from cppbatch.jobs.job_request import JobRequest, RejectedLine
from cppbatch.jobs.jsonl_input import json_item
from cppbatch.jobs.line_reader import MAX_LINE_BYTES, LineReader
from cppbatch.jobs.parquet_input import ParquetInput
from cppbatch.jobs.request_builder import RequestBuilder


class InputReader:
    """Iterating it yields what each line of an input asks for, or why it is refused. Blank lines are left out.

    Lines may ask for these `urls`. The file is opened when iterating begins, each time anew; `ConfigError` is raised
    if it cannot be read, and for a table that has not the columns it should have. Whether names are unique is not
    looked at.
    """

    def __init__(self, form: InputFormat, urls: Collection[str]) -> None:
        self._form = form
        self._requests = RequestBuilder(form, urls)
        self._source: _Source | None = None
        self._is_done = False

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        self.close()
        self._is_done = False
        self._source = self._open()
        yield from self._source
        self._is_done = True
        self.close()

    @property
    def fraction(self) -> float:
        """How much of the file is read, from 0 to 1. Another thread may ask."""
        source = self._source
        if source is None:
            return float(self._is_done)
        return source.fraction

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
        if self._form.kind == "csv":
            return CsvInput(self._form, self._requests)
        if self._form.kind == "parquet":
            return ParquetInput(self._form, self._requests)
        return _LineFile(self._form, self._requests, json_item if self._form.kind == "jsonl" else _text_item)


class _Source(Protocol):
    """A file that is open."""

    @property
    def fraction(self) -> float: ...
    def __iter__(self) -> Iterator[JobRequest | RejectedLine]: ...
    def close(self) -> None: ...


class _LineFile:
    """A file each of whose lines asks for something."""

    def __init__(
        self,
        form: InputFormat,
        requests: RequestBuilder,
        read: Callable[[int, bytes, RequestBuilder], JobRequest | RejectedLine],
    ) -> None:
        self._lines = LineReader(form.path)
        self._requests = requests
        self._read = read

    @property
    def fraction(self) -> float:
        return self._lines.fraction

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        read, requests = self._read, self._requests
        for number, raw in self._lines:
            line = raw.rstrip(b"\r\n")
            if len(line) > MAX_LINE_BYTES:
                message = f"is longer than {MAX_LINE_BYTES} bytes, the most a line may have"
                yield RejectedLine(line=number, code="line_too_long", message=message, content=hash64(line))
            elif line and not line.isspace():
                yield read(number, line, requests)

    def close(self) -> None:
        self._lines.close()


def _text_item(number: int, line: bytes, requests: RequestBuilder) -> JobRequest | RejectedLine:
    return requests.item(number, None, line.decode(errors="surrogateescape"))
