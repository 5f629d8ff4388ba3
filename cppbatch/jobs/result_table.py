"""The results of a finished job as a table: the rows of the input in order, with the answers as additional columns.
Or as a folder: a file with the answer to each file of the input.

While the job runs, its results are JSON lines in another file, as for every job. The table is created from them at the
end, so it is either complete or does not exist.
"""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import msgspec
import numpy as np

from cppbatch.errors import ConfigError
from cppbatch.jobs.durable_files import move_into_place, storage_error
from cppbatch.jobs.input.format import InputFormat, LineReader, field_text
from cppbatch.jobs.input.parquet import ParquetInput, import_pyarrow, python_values
from cppbatch.jobs.input.request_builder import RequestBuilder
from cppbatch.jobs.input.tables import CsvInput
from cppbatch.jobs.job_request import Json, RejectedLine

_TEXT_COLUMNS = ("answer", "reasoning_content", "tool_calls", "logprobs", "finish_reason")
_OPTIONAL = frozenset(("reasoning_content", "tool_calls", "logprobs", "embedding", "embeddings"))
"""Columns that are only in the table if a result has them."""
_COUNTS = ("prompt_tokens", "completion_tokens")
_TEXT_FILES = (".txt", ".text", ".md")
"""Extensions that an answer keeps; the answer to another file has .txt in addition."""

Row = tuple[int, list[Any]]
"""The number of a line of the input, and the values of its columns."""
Column = Any
"""Some rows of a column: a list of Python values, or pyarrow's array."""
Rows = tuple[list[int], list[Column]]
"""The numbers of some lines of the input, and their columns."""


def input_stamp(input_format: InputFormat) -> tuple[int, int, int] | None:
    """Changes when the input does; None if it cannot be opened, which its reader reports, and for files, whose results
    belong to them by name."""
    if input_format.kind == "files":
        return None
    try:
        found = input_format.path.stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def write_table(
    input_format: InputFormat,
    results: Path,
    errors: Path,
    output: Path,
    stamp: tuple[int, int, int] | None,
    *,
    schema: object = None,
) -> None:
    """Writes `output`, a CSV or Parquet file, from the input and its results, replacing an existing file.

    `stamp`: `input_stamp` before the lines were read. `schema`: the JSON schema of the answers, whose properties become
    columns. Raises `ConfigError` if the input has changed since, cannot be
    read, or has values that the table cannot hold; `StorageError`.
    """
    if stamp != input_stamp(input_format):  # results belong to lines by number
        raise ConfigError(
            f"{input_format.path} has changed while its lines were answered, so {output} was not written: the results "
            f"are in {results}. Run the same command again; it checks that answered lines are the same"
        )
    try:
        _write(input_format, _Results(_existing(results, errors), schema), output)
    except (ArithmeticError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{output} cannot hold the columns of {input_format.path} ({type(error).__name__}: {error}): the results "
            f"are in {results}. Use -o with the extension .jsonl, or remove that column"
        ) from error


def write_answers(input_format: InputFormat, results: Path, errors: Path, folder: Path) -> None:
    """Writes the answer to each file of the input to a file of the same name below `folder`, replacing existing files.

    Raises `StorageError`.
    """
    found = _Results(_existing(results, errors))
    try:
        for line, name in enumerate(_answer_names(input_format.files), start=1):
            if (answer := found.values(line)[0]) is None:
                continue
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.write_bytes(field_text(answer).encode(errors="replace"))
            move_into_place(part, path)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        found.close()


def _answer_names(inputs: Sequence[str]) -> list[str]:
    """The names of the files with the answers to these input files, each once."""
    taken, names = set(inputs), []
    for name in inputs:
        named = name
        if PurePosixPath(name).suffix.lower() not in _TEXT_FILES:
            named = f"{name}.txt"
            while named in taken:  # of a file beside it, such as that of report.pdf and report.pdf.txt
                named = f"{named.removesuffix('.txt')}.answer.txt"
            taken.add(named)
        names.append(named)
    return names


def _existing(*paths: Path) -> list[Path]:
    return [path for path in paths if path.exists()]


def _write(input_format: InputFormat, found: _Results, output: Path) -> None:
    source = _open_input(input_format)
    part = Path(os.path.realpath(output)).with_name(f"{output.name}.part")
    try:
        answers = _answer_columns(source.columns, found.columns)
        make = _CsvTable if output.suffix.lower() in (".csv", ".tsv") else _ParquetTable
        table = make(part, source, dict(zip(answers, found.columns, strict=True)), found.properties)
        try:
            for lines, columns in source.rows():
                table.write([*columns, *_columns([found.values(line) for line in lines])])
        finally:
            table.close()
        move_into_place(part, output)
    except OSError as error:
        raise storage_error(output, error) from error
    finally:
        source.close()
        found.close()
        part.unlink(missing_ok=True)


def _answer_columns(columns: Sequence[str], answers: Sequence[str]) -> list[str]:
    """The names of the answer columns: `answer_2` ... if the input already has such columns, perhaps from an earlier
    job."""
    number, names = 1, list(answers)
    while not set(names).isdisjoint(columns):
        number += 1
        names = [f"{name}_{number}" for name in answers]
    return names


class _Results:
    """The results and errors of a job by line number, in constant memory per line."""

    def __init__(self, paths: Sequence[Path], schema: object = None) -> None:
        self._schema = schema
        self._files = [path.open("rb") for path in paths]
        seen: set[str] = set()
        lines, places = array("q"), array("q")  # file * 2 ** 56 + offset
        for number, file in enumerate(self._files):
            offset = 0
            for raw in file:
                result: Json = msgspec.json.decode(raw)
                lines.append(result["line"])
                places.append((number << 56) + offset)
                offset += len(raw)
                seen |= _OPTIONAL & result.keys()
                if isinstance(result.get("embedding"), str):  # base64
                    seen.add("embeddings")
        order = np.argsort(np.array(lines), kind="stable")
        self._lines, self._places = np.array(lines)[order], np.array(places)[order]
        texts = [name for name in _TEXT_COLUMNS if name in seen or name not in _OPTIONAL]
        counts: tuple[str, ...] = _COUNTS
        if vectors := seen & {"embedding", "embeddings"}:
            texts, counts = [max(vectors)], ("prompt_tokens",)
        columns = (*texts, *counts, "error")
        properties: Json = schema.get("properties", {}) if isinstance(schema, dict) else {}
        self.properties = {name: each for name, each in properties.items() if name not in columns}
        """The schemas of the properties of the answers that are columns."""
        self.columns = (*texts[:1], *self.properties, *texts[1:], *counts, "error")

    def values(self, line: int) -> list[Any]:
        """The values of `columns` for a line of the input."""
        result = self._result(line)
        if result.get("response") is not None or result.get("error") is not None:
            error = _message(result)
            return [error if name == "error" else None for name in self.columns]
        usage = result.get("usage", {})
        fields = result | usage | {"answer": result.get("text"), "error": None}
        if "choices" in result:
            fields["answer"] = [choice["text"] for choice in result["choices"]]
            fields["finish_reason"] = result["choices"][0]["finish_reason"]
        if "embedding" in result:
            fields["embeddings"] = [result["embedding"]]
        if self._schema is not None and isinstance(answer := fields["answer"], str):
            fields |= self._parts(answer)
        return [fields.get(name) for name in self.columns]

    def _parts(self, answer: str) -> Json:
        """The columns of an answer in JSON: a text as it is, and the properties of an object."""
        try:
            value = msgspec.json.decode(answer)
        except msgspec.DecodeError:  # it was cut off at its maximum of tokens
            return {}
        if isinstance(value, dict):
            return {name: value.get(name) for name in self.properties}
        return {"answer": value} if isinstance(value, str) else {}

    def _result(self, line: int) -> Json:
        place = int(np.searchsorted(self._lines, line, side="right")) - 1  # the last result, if the line was retried
        if place < 0 or self._lines[place] != line:
            return {}
        number, offset = divmod(int(self._places[place]), 1 << 56)
        file = self._files[number]
        file.seek(offset)
        result: Json = msgspec.json.decode(file.readline())
        return result

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()


def _message(result: Json) -> str:
    """The message of a rejected or failed line."""
    if result["error"] is not None:
        return str(result["error"]["message"])
    return str(result["response"]["body"]["error"]["message"])


# --- the input ------------------------------------------------------------------------------------------------------


class _Input(Protocol):
    """All columns of an input file."""

    columns: list[str]

    def rows(self) -> Iterator[Rows]: ...
    def close(self) -> None: ...


def _columns(rows: Sequence[Sequence[Any]]) -> list[Column]:
    return [list(column) for column in zip(*rows, strict=True)]


def _in_columns(rows: Iterator[Row]) -> Iterator[Rows]:
    """Some rows at a time."""
    while some := list(islice(rows, 1024)):
        yield [line for line, _ in some], _columns([values for _, values in some])


def _open_input(input_format: InputFormat) -> _Input:
    kinds: dict[str, type[_CsvRows] | type[_ParquetRows] | type[_JsonRows] | type[_TextRows] | type[_FileRows]] = {
        "csv": _CsvRows, "parquet": _ParquetRows, "jsonl": _JsonRows, "txt": _TextRows, "files": _FileRows,
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
                yield line, [_valid_text(value) for value in values]

    def close(self) -> None:
        self._input.close()


class _ParquetRows:
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


# --- the output -----------------------------------------------------------------------------------------------------


class _CsvTable:
    """Delimited by commas in `.csv`, by tabs in `.tsv`."""

    def __init__(self, path: Path, source: _Input, answers: dict[str, str], _properties: Json) -> None:
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
    return [_valid_text(field_text(value)) for value in values]


def _valid_text(text: str) -> str:
    """The text with a replacement character for each byte that is not valid UTF-8."""
    return text if text.isascii() else text.encode(errors="surrogateescape").decode(errors="replace")


class _ParquetTable:
    """Columns of a Parquet input keep their types, and properties of a schema have theirs; others are text."""

    def __init__(self, path: Path, source: _Input, answers: dict[str, str], properties: Json) -> None:
        self._arrow, parquet = import_pyarrow()
        arrow = self._arrow
        if isinstance(source, _ParquetRows):
            fields = [(field.name, _plain_type(arrow, field.type)) for field in source.schema]
        else:
            fields = [(name, arrow.string()) for name in source.columns]
        kinds = {name: arrow.int64() for name in _COUNTS} | {"embedding": arrow.list_(arrow.float32())}
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
