"""Prompts in a column of a Parquet file. Needs pyarrow, an extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cppbatch.errors import ConfigError
from cppbatch.jobs.hashing import hash64
from cppbatch.jobs.input_format import InputFormat, table_columns
from cppbatch.jobs.job_request import JobRequest, RejectedLine
from cppbatch.jobs.line_reader import MAX_LINE_BYTES, unreadable_file
from cppbatch.jobs.request_builder import RequestBuilder

_BATCH_BYTES = 4 << 20
_MOST_ROWS = 1024
_BUFFER = 1 << 20
"""Read of a column at once. Without it, or with pre_buffer, pyarrow reads all that a row group has of it."""


class ParquetInput:
    """The items of a Parquet file; their lines are its rows, from 1."""

    def __init__(self, form: InputFormat, requests: RequestBuilder) -> None:
        self._form = form
        self._requests = requests
        self._rows_read = 0
        self._arrow, parquet = _pyarrow()
        self._errors = (self._arrow.ArrowException, OSError, UnicodeDecodeError)  # the last: a column's name
        try:
            file = open(form.path, "rb")  # noqa: SIM115 (close() does); pyarrow's own errors say less
        except (OSError, ValueError) as error:
            raise unreadable_file(form.path, error) from None
        try:
            self._file = parquet.ParquetFile(
                file, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
            )
        except self._errors as error:
            file.close()
            raise self._broken(error) from None
        self._opened = file
        self._rows: int = self._file.metadata.num_rows

    @property
    def fraction(self) -> float:
        return self._rows_read / self._rows if self._rows else 0.0

    def close(self) -> None:
        self._file.close()
        self._opened.close()

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        for cells in self._batches():
            for prompt, name in zip(cells[0], cells[1], strict=True):
                self._rows_read += 1
                yield self._item(self._rows_read, prompt, name)

    def _batches(self) -> Iterator[tuple[list[str | None], list[str | None]]]:
        """The prompts and the names of a few rows each."""
        try:
            columns = self._columns()
            batches = self._file.iter_batches(self._rows_at_once(), columns=columns, use_threads=False)
            for batch in batches:
                prompts, *names = [_cells(batch.column(column)) for column in columns]
                yield prompts, names[0] if names else [None] * len(prompts)
        except self._errors as error:
            raise self._broken(error) from error
        if self._rows_read != self._rows:
            raise self._broken(f"it should have {self._rows} rows")

    def _item(self, row: int, prompt: str | None, name: str | None) -> JobRequest | RejectedLine:
        prompt = prompt or ""
        if len(prompt) > MAX_LINE_BYTES:
            content = hash64(prompt.encode(errors="surrogateescape"))
            message = f"the prompt is longer than {MAX_LINE_BYTES} letters, the most it may have"
            return RejectedLine(line=row, code="line_too_long", message=message, content=content)
        return self._requests.item(row, name, prompt)

    def _columns(self) -> list[str]:
        schema, types = self._file.schema_arrow, self._arrow.types
        columns = table_columns(self._form, schema.names)
        for column, use in zip(columns, ("the prompts", "the names"), strict=False):
            kind = schema.field(column).type
            if not _is_text(types, kind) and not (use == "the names" and types.is_integer(kind)):
                raise ConfigError(f"{self._form.path}: column {column!r} has {use}, and holds no text but {kind}")
        return columns

    def _rows_at_once(self) -> int:
        """So few that prompts of any length take little memory.

        Of all columns together: asking pyarrow 26 for one's size aborts the process if the file is corrupt.
        """
        metadata = self._file.metadata
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        return int(min(max(1, _BATCH_BYTES * self._rows / max(1, size)), _MOST_ROWS))

    def _broken(self, error: object) -> ConfigError:
        where = f" after {self._rows_read} rows" if self._rows_read else ""
        reason = " ".join(str(error).split())
        return ConfigError(f"{self._form.path}: is no Parquet file that can be read{where}: {reason}")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet files need pyarrow: pip install 'cppbatch[parquet]'") from None
    return pyarrow, pyarrow.parquet


def _is_text(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _cells(column: Any) -> list[str | None]:
    """A batch's texts. Numbers are written out; bytes that are no UTF-8 stand as `surrogateescape` leaves them."""
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_cell(cell) for cell in column]
    return [str(value) if isinstance(value, int) else value for value in values]


def _cell(cell: Any) -> str | None:
    try:
        text: str | None = cell.as_py()
    except UnicodeDecodeError:
        text = bytes(cell.as_buffer()).decode(errors="surrogateescape")
    return text
