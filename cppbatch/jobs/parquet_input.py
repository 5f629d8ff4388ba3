"""Reads prompts from a column of a Parquet file. Needs pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cppbatch.errors import ConfigError
from cppbatch.jobs.input_format import InputFormat, table_columns
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
        self._arrow, parquet = _import_pyarrow()
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
    def fraction(self) -> float:
        return self._rows_read / self._n_rows if self._n_rows else 0.0

    def close(self) -> None:
        self._parquet.close()
        self._file.close()

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        for prompts, custom_ids in self._batches():
            for prompt, custom_id in zip(prompts, custom_ids, strict=True):
                self._rows_read += 1
                yield self._request(self._rows_read, prompt, custom_id)

    def _batches(self) -> Iterator[tuple[list[str | None], list[str | None]]]:
        """Prompts and custom IDs, some rows at a time."""
        try:
            columns = self._columns()
            batches = self._parquet.iter_batches(self._batch_rows(), columns=columns, use_threads=False)
            for batch in batches:
                prompts, *custom_ids = [_texts(batch.column(column)) for column in columns]
                yield prompts, custom_ids[0] if custom_ids else [None] * len(prompts)
        except self._errors as error:
            raise self._invalid_file(error) from error
        if self._rows_read != self._n_rows:
            raise self._invalid_file(f"it should have {self._n_rows} rows")

    def _request(self, row: int, prompt: str | None, custom_id: str | None) -> JobRequest | RejectedLine:
        prompt = prompt or ""
        if len(prompt) > MAX_LINE_BYTES:
            content_hash = hash64(prompt.encode(errors="surrogateescape"))
            message = f"the prompt is longer than {MAX_LINE_BYTES} characters, the maximum length"
            return RejectedLine(line=row, code="line_too_long", message=message, content_hash=content_hash)
        return self._builder.from_prompt(row, custom_id, prompt)

    def _columns(self) -> list[str]:
        schema, types = self._parquet.schema_arrow, self._arrow.types
        columns = table_columns(self._format, schema.names)
        for column, content in zip(columns, ("prompts", "custom IDs"), strict=False):
            kind = schema.field(column).type
            if not _is_text(types, kind) and not (content == "custom IDs" and types.is_integer(kind)):
                raise ConfigError(f"{self._format.path}: column {column!r} for {content} is not text but {kind}")
        return columns

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
        return ConfigError(f"{self._format.path}: is not a readable Parquet file{where}: {reason}")


def _import_pyarrow() -> tuple[Any, Any]:
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


def _texts(column: Any) -> list[str | None]:
    """The texts of a column. Integers become decimal text; invalid UTF-8 is decoded with `surrogateescape`."""
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_text(cell) for cell in column]
    return [str(value) if isinstance(value, int) else value for value in values]


def _text(cell: Any) -> str | None:
    try:
        text: str | None = cell.as_py()
    except UnicodeDecodeError:
        text = bytes(cell.as_buffer()).decode(errors="surrogateescape")
    return text
