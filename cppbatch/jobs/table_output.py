"""Tables that are written: CSV, TSV and Parquet files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cppbatch.jobs.input.format import field_text
from cppbatch.jobs.input.parquet import import_pyarrow, python_values
from cppbatch.jobs.job_request import Json
from cppbatch.jobs.table_input import Column, ParquetRows, TableInput, valid_text

COUNTS = ("prompt_tokens", "completion_tokens")
"""Columns of numbers."""


class CsvTable:
    """Delimited by commas in `.csv`, by tabs in `.tsv`."""

    def __init__(self, path: Path, source: TableInput, answers: dict[str, str], _properties: Json) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        is_tsv = path.name.lower().endswith(".tsv.part")
        form: dict[str, Any] = {"delimiter": "\t" if is_tsv else ",", "lineterminator": "\n"}
        self._plain, self._quoted = (
            csv.writer(self._file, **form),
            csv.writer(self._file, **form, quoting=csv.QUOTE_ALL),
        )
        self._write([*source.columns, *answers])

    def write(self, columns: list[Column]) -> None:
        for row in zip(*map(_column_texts, columns), strict=True):
            self._write(row)

    def _write(self, texts: Sequence[str]) -> None:
        writer = self._quoted if any("\r" in text for text in texts) else self._plain  # csv does not quote a lone \r
        writer.writerow(texts)

    def close(self) -> None:
        self._file.close()


def _column_texts(column: Column) -> list[str]:
    values = column if isinstance(column, list) else python_values(import_pyarrow()[0], column)
    return [valid_text(field_text(value)) for value in values]


class ParquetTable:
    """Columns of a Parquet input keep their types, and properties of a schema have theirs; others are text."""

    def __init__(self, path: Path, source: TableInput, answers: dict[str, str], properties: Json) -> None:
        self._arrow, parquet = import_pyarrow()
        arrow = self._arrow
        if isinstance(source, ParquetRows):
            fields = [(field.name, _plain_type(arrow, field.type)) for field in source.schema]
        else:
            fields = [(name, arrow.string()) for name in source.columns]
        kinds = {name: arrow.int64() for name in COUNTS} | {"embedding": arrow.list_(arrow.float32())}
        typed = {"integer": arrow.int64(), "number": arrow.float64(), "boolean": arrow.bool_()}
        of_schema = {name: each.get("type") for name, each in properties.items() if isinstance(each, dict)}
        kinds |= {name: typed[kind] for name, kind in of_schema.items() if isinstance(kind, str) and kind in typed}
        fields += [(name, kinds.get(answer, arrow.string())) for name, answer in answers.items()]
        self._schema = arrow.schema(fields)
        self._writer = parquet.ParquetWriter(path, self._schema)

    def write(self, columns: list[Column]) -> None:
        arrays = [self._array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(self._arrow.record_batch(arrays, schema=self._schema))

    def _array(self, column: Column, kind: Any) -> Any:
        """A column of the input as it is: its values may be none that Python has."""
        if not isinstance(column, list):
            return column.dictionary_decode() if self._arrow.types.is_dictionary(column.type) else column
        is_text = self._arrow.types.is_string(kind)
        shown = [None if value is None else field_text(value) for value in column] if is_text else column
        return self._arrow.array(shown, kind)

    def close(self) -> None:
        self._writer.close()


def _plain_type(arrow: Any, kind: Any) -> Any:
    """The type of a column's values, without their encoding."""
    return kind.value_type if arrow.types.is_dictionary(kind) else kind
