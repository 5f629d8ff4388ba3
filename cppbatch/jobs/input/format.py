"""The format of a job's input file: lines, prompt templates, and the requests built from them."""

from __future__ import annotations

import math
import os
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from cppbatch.errors import ConfigError, name_first
from cppbatch.regular_files import STANDARD_STREAM, is_special, open_regular

FileKind = Literal["jsonl", "txt", "csv", "parquet", "files"]
Endpoint = Literal["completions", "chat", "embeddings"]

_KINDS: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "txt",
    ".text": "txt",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_TABLES = ("csv", "parquet")
_FIELDS: dict[str, tuple[set[str], str]] = {
    "txt": ({"prompt"}, "{prompt} for the line"),
    "files": ({"text", "file"}, "{text} for the text of a file and {file} for its name"),
}
"""What a template may name in an input without columns."""

MAX_SHOWN = 40
"""Characters of a value in a message."""


class InputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How to read an input file. `detect_input_format` creates it from a path and the user's options."""

    path: Path
    kind: FileKind
    files: tuple[str, ...] = ()
    """For kind `files`: the names of the files below the folder, or in the zip file, `path`; each is a prompt."""
    whole_folder: bool = False
    """Whether the files are those of a whole folder, in which the job must not write."""
    column: str | None = None
    """The column with the prompts; None for files without columns, and with a template."""
    template: str | None = None
    """The text of a `PromptTemplate`, which creates a prompt from each row."""
    id_column: str | None = None
    """The column with the custom IDs; None: custom_id or id, if there is one."""
    by_line: bool = False
    """Whether results are named by line although there is a column `id`, because `id_problem` found one."""
    only_prompts: bool = False
    """Whether to reject requests in OpenAI's format, because their results are not table rows."""
    endpoint: Endpoint = "completions"
    """The endpoint for plain prompts."""
    system: str | None = None
    """The system message of chats created from plain prompts."""


def detect_input_format(
    path: str | Path,
    column: str | None = None,
    endpoint: Endpoint = "completions",
    system: str | None = None,
    *,
    template: str | None = None,
    id_column: str | None = None,
    only_prompts: bool = False,
    files: tuple[str, ...] | None = None,
    whole_folder: bool = False,
) -> InputFormat:
    """The format of a file according to its extension. Does not open the file.

    `files`: the prompts are these files of the folder or zip file `path` (`find_inputs`). Raises `ConfigError` for an
    unknown extension and for options that contradict each other.
    """
    path = Path(path)
    if files is None and os.path.isdir(path):
        raise ConfigError(f"{path}: is a folder; give a file")
    if is_special(path) or path == STANDARD_STREAM:
        raise ConfigError(
            f"{path}: is not a regular file; a job reads its input several times: save it to a file first"
        )
    texts = {"--column": column, "--template": template, "--id-column": id_column, "--system": system}
    for flag, text in texts.items():
        if text is not None and not is_unicode(text):
            raise ConfigError(f"{flag} {describe_non_text(text.encode(errors='surrogateescape'))}")
    kind = _KINDS.get(path.suffix.lower()) if files is None else "files"
    if kind is None:
        raise ConfigError(
            f"{path}: unknown input format {path.suffix!r}; the extension must be one of {', '.join(_KINDS)}"
        )
    if template is not None:
        fields = PromptTemplate(template).fields
        if column is not None:
            raise ConfigError("--column and --template cannot be combined; give only one of them")
        known, words = _FIELDS.get(kind, (set(fields), ""))
        if not known.issuperset(fields):
            raise ConfigError(f"{path}: has no columns; in --template, use {words}")
    elif kind in _TABLES:
        column = "prompt" if column is None else column
    elif column is not None:
        raise ConfigError(f"{path}: has no columns, so --column {column!r} does not apply; it is for CSV and Parquet")
    if id_column is not None and kind in ("txt", "files"):
        raise ConfigError(f"{path}: has no columns, so --id-column {id_column!r} does not apply")
    if system is not None and endpoint != "chat":
        raise ConfigError(f"--system requires --endpoint chat; the endpoint is {endpoint}")
    return InputFormat(
        path=path,
        kind=kind,
        files=files or (),
        whole_folder=whole_folder,
        column=column,
        template=template,
        id_column=id_column,
        only_prompts=only_prompts,
        endpoint=endpoint,
        system=system,
    )


def auto_id_columns(input_format: InputFormat) -> tuple[str, ...]:
    """The columns that have the custom IDs without --id-column; the first one that exists counts."""
    return ("custom_id",) if input_format.by_line else ("custom_id", "id")


class TableColumns(NamedTuple):
    """The columns of a table from which requests are built."""

    prompt: tuple[str, ...]
    """The column with the prompts, or the columns in the template."""
    custom_id: str | None


def table_columns(input_format: InputFormat, names: Sequence[str]) -> TableColumns:
    """The columns of a table to read.

    Raises `ConfigError` if one of them is missing or ambiguous.
    """
    path, template, id_column = input_format.path, input_format.template, input_format.id_column
    prompt = PromptTemplate(template).fields if template is not None else (str(input_format.column),)
    wanted = dict.fromkeys(prompt, "--column" if template is None else "--template")
    if id_column is not None:
        wanted.setdefault(id_column, "--id-column")
    for column, flag in wanted.items():
        if column not in names:
            known = name_first([repr(name[:MAX_SHOWN]) for name in names], 20)
            raise ConfigError(f"{path}: column {column!r} not found; available: {known} ({flag})")
    others = (name for name in auto_id_columns(input_format) if name in names and (template or name not in prompt))
    custom_id = id_column or next(others, None)
    for used in (*prompt, *filter(None, [custom_id])):
        if names.count(used) > 1:
            raise ConfigError(f"{path}: has {names.count(used)} columns named {used!r}")
    return TableColumns(prompt, custom_id)


class MissingField(Exception):
    """A row has no value for a field of the template."""


class PromptTemplate:
    """A text with column names in braces; `{{` and `}}` are literal braces. Raises `ConfigError` for anything else."""

    def __init__(self, source: str) -> None:
        try:
            self._parts = list(string.Formatter().parse(source))
        except ValueError as error:
            raise _invalid(source, str(error)) from None
        for _, name, spec, conversion in self._parts:
            if name == "":
                raise _invalid(source, "{} does not name a column")
            if spec or conversion:
                raise _invalid(source, f"{{{name}}} has a format specification, which is not supported")
        self.fields = tuple(dict.fromkeys(name for _, name, _, _ in self._parts if name is not None))
        """The columns in the template, in order."""
        if not self.fields:
            raise _invalid(source, "it does not name a column")

    def render(self, values: Mapping[str, object]) -> str:
        """The prompt of a row. Raises `MissingField`."""
        return "".join(
            literal + ("" if name is None else self._text(name, values)) for literal, name, _, _ in self._parts
        )

    def _text(self, name: str, values: Mapping[str, object]) -> str:
        value = values.get(name)
        if _is_missing(value):
            have = ", ".join(repr(column)[:40] for column in list(values)[:8])
            problem = f"does not exist; available: {have}"
            if name in values:
                problem = "is null" if value is None else "is NaN"
            raise MissingField(f"{name!r} {problem}")
        return field_text(value)


def field_text(value: object) -> str:
    """A table value as text: strings unchanged, null and NaN as an empty string, others as JSON, or with `str` if
    necessary."""
    if _is_missing(value):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    try:
        return msgspec.json.encode(value).decode().strip('"')
    except (TypeError, ValueError, OverflowError):
        return str(value)


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _invalid(source: str, problem: str) -> ConfigError:
    return ConfigError(
        f"--template is {source!r:.200}: {problem}. Write column names in braces, like {{text}}, and double all other "
        "braces"
    )


MAX_LINE_BYTES = 16 << 20
"""Without the line end. A longer line is probably not a request but a sign of a damaged file."""

_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 18


class LineReader:
    """Opens a file. Iterating yields (line number from 1, line with its line end).

    A line longer than `MAX_LINE_BYTES` is truncated, but stays longer than `MAX_LINE_BYTES`, so that the caller can
    detect it. A UTF-8 byte order mark at the start is skipped. Raises `ConfigError` if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = open_regular(path, _READ_BYTES)
        except (OSError, ValueError) as error:  # ValueError: an invalid path, for example with a null byte
            raise unreadable_file(path, error) from None
        self._path = path

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        try:
            yield from self._lines()
        except OSError as error:
            raise unreadable_file(self._path, error) from error

    def close(self) -> None:
        self._file.close()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        file = self._file
        if file.peek(len(_BOM)).startswith(_BOM):
            file.read(len(_BOM))
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                self._skip_line()
            yield number, line

    def _skip_line(self) -> None:
        while piece := self._file.readline(_READ_BYTES):
            if piece.endswith(b"\n"):
                return


def unreadable_file(path: Path, error: Exception) -> ConfigError:
    """The `ConfigError` for an input file that cannot be opened or read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"{path}: cannot be read: {reason}")


def describe_non_text(data: bytes) -> str:
    """The error message for bytes that are not text."""
    guess = ", perhaps UTF-16" if b"\0" in data else ""
    return f"is not UTF-8 text{guess}: {data[:MAX_SHOWN]!r}"


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: it has no bytes that are not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
