"""All columns of an input file, for the table of its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from cppbatch.jobs.input.format import InputFormat, LineReader
from cppbatch.jobs.input.parquet import ParquetInput
from cppbatch.jobs.input.request_builder import RequestBuilder
from cppbatch.jobs.input.tables import CsvInput
from cppbatch.jobs.job_request import Json, RejectedLine

Row = tuple[int, list[Any]]
"""The number of a line of the input, and the values of its columns."""
Column = Any
"""Some rows of a column: a list of Python values, or pyarrow's array."""
Rows = tuple[list[int], list[Column]]
"""The numbers of some lines of the input, and their columns."""


class TableInput(Protocol):
    """All columns of an input file."""

    columns: list[str]

    def rows(self) -> Iterator[Rows]: ...
    def close(self) -> None: ...


def columns_of(rows: Sequence[Sequence[Any]]) -> list[Column]:
    """The columns of these rows."""
    return [list(column) for column in zip(*rows, strict=True)]


def _in_columns(rows: Iterator[Row]) -> Iterator[Rows]:
    """Some rows at a time."""
    while some := list(islice(rows, 1024)):
        yield [line for line, _ in some], columns_of([values for _, values in some])


def open_input(input_format: InputFormat) -> TableInput:
    """Raises what the readers of the format raise."""
    kinds: dict[str, type[_CsvRows] | type[ParquetRows] | type[_JsonRows] | type[_TextRows] | type[_FileRows]] = {
        "csv": _CsvRows, "parquet": ParquetRows, "jsonl": _JsonRows, "txt": _TextRows, "files": _FileRows,
    }  # fmt: skip
    return kinds[input_format.kind](input_format)


class _CsvRows:
    def __init__(self, input_format: InputFormat) -> None:
        self._input = CsvInput(input_format, RequestBuilder(input_format, ()))
        self._records = self._input.records()
        self._first = next(self._records, None)
        self.columns = self._input.columns

    def rows(self) -> Iterator[Rows]:
        """All rows, without unreadable records."""
        return _in_columns(self._rows())

    def _rows(self) -> Iterator[Row]:
        for record in (self._first, *self._records) if self._first else ():
            if not isinstance(record, RejectedLine):
                line, values = record
                yield line, [valid_text(value) for value in values]

    def close(self) -> None:
        self._input.close()


class ParquetRows:
    def __init__(self, input_format: InputFormat) -> None:
        self._input = ParquetInput(input_format, RequestBuilder(input_format, ()))
        self.schema = self._input.schema
        self.columns: list[str] = self.schema.names

    def rows(self) -> Iterator[Rows]:
        first = 1
        for batch in self._input.batches():
            yield list(range(first, first + batch.num_rows)), batch.columns
            first += batch.num_rows

    def close(self) -> None:
        self._input.close()


class _JsonRows:
    """Lines of JSON. The columns are the fields of all lines."""

    def __init__(self, input_format: InputFormat) -> None:
        self._path = input_format.path
        self.columns = list(dict.fromkeys(name for _, record in self._records() for name in record))

    def _records(self) -> Iterator[tuple[int, Json]]:
        lines = LineReader(self._path)
        try:
            for number, raw in lines:
                try:
                    record: Any = msgspec.json.decode(raw) if raw.strip() else None
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
                if isinstance(record, (str, dict)):
                    yield number, {"prompt": record} if isinstance(record, str) else record
        finally:
            lines.close()

    def rows(self) -> Iterator[Rows]:
        return _in_columns((number, [record.get(name) for name in self.columns]) for number, record in self._records())

    def close(self) -> None:
        pass


class _TextRows:
    """Lines that are prompts."""

    columns: list[str]

    def __init__(self, input_format: InputFormat) -> None:
        self._lines = LineReader(input_format.path)
        self.columns = ["prompt"]

    def rows(self) -> Iterator[Rows]:
        lines = ((number, raw.rstrip(b"\r\n")) for number, raw in self._lines if raw.strip())
        return _in_columns((number, [line.decode(errors="replace")]) for number, line in lines)

    def close(self) -> None:
        self._lines.close()


class _FileRows:
    """Files that are prompts."""

    columns: list[str]

    def __init__(self, input_format: InputFormat) -> None:
        self._names = input_format.files
        self.columns = ["file"]

    def rows(self) -> Iterator[Rows]:
        return _in_columns((line, [name]) for line, name in enumerate(self._names, start=1))

    def close(self) -> None:
        pass


def valid_text(text: str) -> str:
    """The text with a replacement character for each byte that is not valid UTF-8."""
    return text if text.isascii() else text.encode(errors="surrogateescape").decode(errors="replace")
