"""Reads prompts from a column of a Parquet file. Needs pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cppbatch.errors import ConfigError
from cppbatch.extras import require
from cppbatch.jobs.input.format import MAX_LINE_BYTES, InputFormat, TableColumns, table_columns, unreadable_file
from cppbatch.jobs.input.request_builder import LineError, RequestBuilder
from cppbatch.jobs.job_request import JobRequest, RejectedLine, hash64
from cppbatch.regular_files import open_regular


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
            file = open_regular(input_format.path)  # pyarrow's own errors are less clear
        except (OSError, ValueError) as error:
            raise unreadable_file(input_format.path, error) from None
        try:
            # Without a buffer size, or with pre_buffer, pyarrow reads the whole column of a row group.
            self._parquet = parquet.ParquetFile(
                file, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
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

    def ids(self) -> Iterator[tuple[int, Any]]:
        """The row and the value of each row in the column `id`, if that names the results. Raises `LineError`."""
        names, kind = self.schema.names, None
        if table_columns(self._format, names).custom_id == "id":
            kind = self.schema.field("id").type
            if not self._may_name(kind):
                raise LineError("invalid_custom_id", f"its type is {kind}")
            yield from enumerate((value for (value,) in self.rows(["id"])), start=1)

    def rows(self, names: Sequence[str]) -> Iterator[list[Any]]:
        """The values of these columns in each row, some rows at a time."""
        self._rows_read = 0
        for batch in self.batches(names):
            columns = [python_values(self._arrow, batch.column(name)) for name in names]
            for row in zip(*columns, strict=True) if columns else ():
                self._rows_read += 1
                yield list(row)

    def batches(self, names: Sequence[str] | None = None) -> Iterator[Any]:
        """pyarrow's record batches with these columns; None: with all."""
        n_rows = 0
        columns = None if names is None else list(names)
        try:
            for batch in self._parquet.iter_batches(self._batch_rows(), columns=columns, use_threads=False):
                yield batch
                n_rows += batch.num_rows
        except self._errors as error:
            raise self._invalid_file(error, n_rows) from error
        if n_rows != self._n_rows:
            raise self._invalid_file(f"it should have {self._n_rows} rows", n_rows)

    def _request(self, row: int, values: dict[str, Any], custom_id: str | None) -> JobRequest | RejectedLine:
        longest = max((len(value) for value in values.values() if isinstance(value, str)), default=0)
        if longest > MAX_LINE_BYTES:
            content_hash = hash64(repr(values).encode(errors="surrogateescape"))
            message = f"the prompt is longer than {MAX_LINE_BYTES} characters, the maximum length"
            return RejectedLine(line=row, code="line_too_long", message=message, content_hash=content_hash)
        return self._builder.from_row(row, custom_id, values)

    def _columns(self) -> TableColumns:
        schema, types, path = self._parquet.schema_arrow, self._arrow.types, self._format.path
        wanted = table_columns(self._format, schema.names)
        for column in wanted.prompt:
            kind = schema.field(column).type
            if self._builder.has_template and _has_bytes(types, kind):
                raise ConfigError(f"{path}: column {column!r} in --template is {kind}, not text: convert it to text")
            if not self._builder.has_template and not _is_text(types, kind):
                raise ConfigError(f"{path}: column {column!r} for prompts must be text, but is {kind}")
        if wanted.custom_id is not None and not self._may_name(kind := schema.field(wanted.custom_id).type):
            raise ConfigError(f"{path}: column {wanted.custom_id!r} for custom IDs must be text, but is {kind}")
        return wanted

    def _may_name(self, kind: Any) -> bool:
        """Whether values of this type can be custom IDs."""
        return _is_text(self._arrow.types, kind) or bool(self._arrow.types.is_integer(kind))

    def _batch_rows(self) -> int:
        """The number of rows to read at a time, small enough that long prompts take little memory.

        Calculated from the size of all columns: asking pyarrow 26 for the size of one column aborts the process if the
        file is corrupt.
        """
        metadata = self._parquet.metadata
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        return int(min(max(1, (4 << 20) * self._n_rows / max(1, size)), 1024))

    def _invalid_file(self, error: object, n_rows: int = 0) -> ConfigError:
        where = f" after {n_rows} rows" if n_rows else ""
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


def _has_bytes(types: Any, kind: Any) -> bool:
    """Whether values of this type are or contain binary data."""
    if getattr(kind, "extension_name", "") == "arrow.uuid":  # has a text
        return False
    kind = getattr(kind, "storage_type", kind)  # of an extension type
    if types.is_dictionary(kind):
        kind = kind.value_type
    is_bytes = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    if any(check(kind) for check in is_bytes) or "binary_view" in str(kind):
        return True
    return any(_has_bytes(types, kind.field(i).type) for i in range(kind.num_fields))


# What Python's types cannot hold: dates after 9999, unknown time zones, invalid UTF-8.
_NOT_IN_PYTHON = (ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError)


def python_values(arrow: Any, column: Any) -> list[Any]:
    """The values of a column as Python's types. Those that these cannot hold are texts; invalid UTF-8 is decoded with
    `surrogateescape`."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return list(_in_microseconds(arrow, column).to_pylist())
    except _NOT_IN_PYTHON:
        return [_python_value(arrow, cell) for cell in column]


def _in_microseconds(arrow: Any, column: Any) -> Any:
    """Nanoseconds in microseconds if these suffice, else as text: what pyarrow returns depends on whether pandas is
    installed."""
    kind = column.type
    if getattr(kind, "unit", None) != "ns":
        return column
    if arrow.types.is_timestamp(kind):
        coarser = arrow.timestamp("us", kind.tz)
    else:
        coarser = arrow.time64("us") if arrow.types.is_time(kind) else arrow.duration("us")
    try:
        return column.cast(coarser)
    except arrow.ArrowInvalid:  # it would lose digits
        return column.cast(arrow.string())


def _python_value(arrow: Any, cell: Any) -> Any:
    types, kind = arrow.types, cell.type
    try:
        if cell.is_valid and types.is_struct(kind):
            return {name: _python_value(arrow, cell[name]) for name in cell}
        if cell.is_valid and (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            return python_values(arrow, cell.values)
        return cell.as_py()
    except _NOT_IN_PYTHON:
        return python_values(arrow, cell.values) if types.is_map(kind) else _cell_text(arrow, cell)


def _cell_text(arrow: Any, cell: Any) -> str:
    kind = cell.type
    if _is_text(arrow.types, kind):
        return bytes(cell.as_buffer()).decode(errors="surrogateescape")
    if arrow.types.is_timestamp(kind) and kind.tz:  # an unknown time zone
        return f"{cell.cast(arrow.timestamp(kind.unit)).cast(arrow.string())}Z"
    return str(cell.cast(arrow.string()))
