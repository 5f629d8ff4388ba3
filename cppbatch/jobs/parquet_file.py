"""Prompts in a column of a Parquet file. Needs pyarrow, an extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cppbatch.errors import ConfigError
from cppbatch.jobs.forms import InputForm, table_columns
from cppbatch.jobs.hashing import hash64
from cppbatch.jobs.items import Item, Refused
from cppbatch.jobs.lines import LONGEST_LINE, unreadable
from cppbatch.jobs.requests import Requests

_BATCH_BYTES = 4 << 20
_MOST_ROWS = 1024
_BUFFER = 1 << 20
"""Read of a column at once; without it pyarrow reads all that a row group has of it."""


class ParquetFile:
    """The items of a Parquet file; their lines are its rows, from 1."""

    def __init__(self, form: InputForm, requests: Requests) -> None:
        self._form = form
        self._requests = requests
        self._rows_read = 0
        self._arrow, parquet = _pyarrow()
        try:
            file = open(form.path, "rb")  # noqa: SIM115 (close() does); pyarrow's own errors say less
        except (OSError, ValueError) as error:
            raise unreadable(form.path, error) from None
        try:
            self._file = parquet.ParquetFile(file, buffer_size=_BUFFER)
        except (self._arrow.ArrowException, OSError) as error:
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

    def __iter__(self) -> Iterator[Item | Refused]:
        columns = self._columns()
        batches = self._file.iter_batches(self._rows_at_once(columns[0]), columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                cells = [_cells(batch.column(column)) for column in columns]
            except (self._arrow.ArrowException, OSError) as error:
                raise self._broken(error) from error
            names = cells[1] if len(columns) > 1 else [None] * len(batch)
            for prompt, name in zip(cells[0], names, strict=True):
                self._rows_read += 1
                yield self._item(self._rows_read, prompt, name)

    def _item(self, row: int, prompt: str | None, name: str | None) -> Item | Refused:
        prompt = prompt or ""
        if len(prompt) > LONGEST_LINE:
            content = hash64(prompt.encode(errors="surrogateescape"))
            message = f"the prompt is longer than {LONGEST_LINE} letters, the most it may have"
            return Refused(line=row, code="line_too_long", message=message, content=content)
        return self._requests.item(row, name, prompt)

    def _columns(self) -> list[str]:
        schema, types = self._file.schema_arrow, self._arrow.types
        columns = table_columns(self._form, schema.names)
        for column, use in zip(columns, ("the prompts", "the names"), strict=False):
            kind = schema.field(column).type
            if not _is_text(types, kind) and not (use == "the names" and types.is_integer(kind)):
                raise ConfigError(f"{self._form.path}: column {column!r} has {use}, and holds no text but {kind}")
        return columns

    def _rows_at_once(self, column: str) -> int:
        """So few that prompts of any length take little memory."""
        metadata = self._file.metadata
        size = 0
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                size += chunk.total_uncompressed_size if chunk.path_in_schema == column else 0
        row_size = size / max(1, self._rows)
        return int(min(max(1, _BATCH_BYTES / max(1, row_size)), _MOST_ROWS))

    def _broken(self, error: Exception) -> ConfigError:
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
