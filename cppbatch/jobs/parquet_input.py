"""Reads prompts from a column of a Parquet file. Needs pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cppbatch.errors import ConfigError
from cppbatch.extras import require
from cppbatch.jobs.input_format import InputFormat, TableColumns, table_columns
from cppbatch.jobs.job_request import JobRequest, RejectedLine, hash64
from cppbatch.jobs.line_reader import MAX_LINE_BYTES, unreadable_file
from cppbatch.jobs.request_builder import RequestBuilder

_BATCH_BYTES = 4 << 20
_MAX_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20
"""Bytes of a column read at once. Without a buffer size, or with pre_buffer, pyarrow reads the whole column of a row
group."""


class ParquetInput:
    """The requests of a Parquet file. Their line numbers are row numbers, from 1."""

    def __init__(self, input_format: InputFormat, builder: RequestBuilder) -> None:
        self._format = input_format
        self._builder = builder
        self._rows_read = 0
        self._arrow, parquet = import_pyarrow()
        # UnicodeDecodeError: from a column name that is not valid UTF-8.
        self._errors = (self._arrow.ArrowException, OSError, UnicodeDecodeError)
        try:
            file = open(input_format.path, "rb")  # noqa: SIM115 (close() does); pyarrow's own errors are less clear
        except (OSError, ValueError) as error:
            raise unreadable_file(input_format.path, error) from None
        try:
            self._parquet = parquet.ParquetFile(
                file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
        except self._errors as error:
            file.close()
            raise self._invalid_file(error) from None
        self._file = file
        self._n_rows: int = self._parquet.metadata.num_rows

    @property
    def schema(self) -> Any:
        """pyarrow's schema: the names and the types of all columns."""
        return self._parquet.schema_arrow

    def count(self) -> Iterator[int]:
        """The number of rows."""
        return iter([self._n_rows])

    def close(self) -> None:
        self._parquet.close()
        self._file.close()

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        wanted = self._columns()
        names = list(dict.fromkeys([*wanted.prompt, *filter(None, [wanted.custom_id])]))
        for row in self.rows(names):
            values = dict(zip(names, row, strict=True))
            custom_id = None if wanted.custom_id is None else values[wanted.custom_id]
            prompt = {name: values[name] for name in wanted.prompt}
            yield self._request(self._rows_read, prompt, None if custom_id is None else str(custom_id))

    def rows(self, names: Sequence[str]) -> Iterator[list[Any]]:
        """The values of these columns in each row, some rows at a time."""
        self._rows_read = 0
        try:
            for batch in self._parquet.iter_batches(self._batch_rows(), columns=list(names), use_threads=False):
                columns = [_values(batch.column(name)) for name in names]
                for row in zip(*columns, strict=True) if columns else ():
                    self._rows_read += 1
                    yield list(row)
        except self._errors as error:
            raise self._invalid_file(error) from error
        if self._rows_read != self._n_rows:
            raise self._invalid_file(f"it should have {self._n_rows} rows")

    def _request(self, row: int, values: dict[str, Any], custom_id: str | None) -> JobRequest | RejectedLine:
        longest = max((len(value) for value in values.values() if isinstance(value, str)), default=0)
        if longest > MAX_LINE_BYTES:
            content_hash = hash64(repr(values).encode(errors="surrogateescape"))
            message = f"the prompt is longer than {MAX_LINE_BYTES} characters, the maximum length"
            return RejectedLine(line=row, code="line_too_long", message=message, content_hash=content_hash)
        return self._builder.from_row(row, custom_id, values)

    def _columns(self) -> TableColumns:
        schema, types = self._parquet.schema_arrow, self._arrow.types
        wanted = table_columns(self._format, schema.names)
        contents = {} if self._builder.has_template else dict.fromkeys(wanted.prompt, "prompts")
        if wanted.custom_id is not None:
            contents[wanted.custom_id] = "custom IDs"
        for column, content in contents.items():
            kind = schema.field(column).type
            if not _is_text(types, kind) and not (content == "custom IDs" and types.is_integer(kind)):
                raise ConfigError(f"{self._format.path}: column {column!r} for {content} must be text, but is {kind}")
        return wanted

    def _batch_rows(self) -> int:
        """Rows read at a time: few enough that long prompts take little memory.

        Calculated from the size of all columns: asking pyarrow 26 for the size of one column aborts the process if the
        file is corrupt.
        """
        metadata = self._parquet.metadata
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        return int(min(max(1, _BATCH_BYTES * self._n_rows / max(1, size)), _MAX_BATCH_ROWS))

    def _invalid_file(self, error: object) -> ConfigError:
        where = f" after {self._rows_read} rows" if self._rows_read else ""
        reason = " ".join(str(error).split())
        return ConfigError(f"{self._format.path}: cannot be read as Parquet{where}: {reason}")


def import_pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet. Raises `ConfigError` if it is not installed."""
    require("pyarrow", "a Parquet file")
    import pyarrow
    import pyarrow.parquet

    return pyarrow, pyarrow.parquet


def _is_text(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _values(column: Any) -> list[Any]:
    """The values of a column. Invalid UTF-8 is decoded with `surrogateescape`."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_value(cell) for cell in column]
    return values


def _value(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return bytes(cell.as_buffer()).decode(errors="surrogateescape")
