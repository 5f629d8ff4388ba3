"""The results of a finished job as a table: the rows of the input in order, with the answers as additional columns.
Or as a folder: a file with the answer to each file of the input.

While the job runs, its results are JSON lines in another file, as for every job. The table is created from them at the
end, so it is either complete or does not exist.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from cppbatch.errors import ConfigError
from cppbatch.jobs.durable_files import move_into_place, storage_error
from cppbatch.jobs.input.format import InputFormat, field_text
from cppbatch.jobs.job_request import Json
from cppbatch.jobs.table_input import columns_of, open_input
from cppbatch.jobs.table_output import COUNTS, CsvTable, ParquetTable

_TEXT_COLUMNS = ("answer", "reasoning_content", "tool_calls", "logprobs", "finish_reason")
_OPTIONAL = frozenset(("reasoning_content", "tool_calls", "logprobs", "embedding", "embeddings"))
"""Columns that are only in the table if a result has them."""
_TEXT_FILES = (".txt", ".text", ".md")
"""Extensions that an answer keeps; the answer to another file has .txt in addition."""


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
    source = open_input(input_format)
    part = Path(os.path.realpath(output)).with_name(f"{output.name}.part")
    try:
        answers = _answer_columns(source.columns, found.columns)
        make = CsvTable if output.suffix.lower() in (".csv", ".tsv") else ParquetTable
        table = make(part, source, dict(zip(answers, found.columns, strict=True)), found.properties)
        try:
            for lines, columns in source.rows():
                table.write([*columns, *columns_of([found.values(line) for line in lines])])
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
        counts: tuple[str, ...] = COUNTS
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
