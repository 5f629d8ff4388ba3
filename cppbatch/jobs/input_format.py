"""The format of a job's input file, and how the prompts in it become requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cppbatch.errors import ConfigError

FileKind = Literal["jsonl", "txt", "csv", "parquet"]
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
_MAX_COLUMNS_SHOWN = 20


class InputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How an input file is read. `detect_input_format` makes one from a path and the user's options."""

    path: Path
    kind: FileKind
    column: str | None = None
    """The column with the prompts; None for files without columns."""
    endpoint: Endpoint = "completions"
    """The endpoint that plain prompts are sent to."""
    system: str | None = None
    """The system message of chats made from plain prompts."""


def detect_input_format(
    path: str | Path, column: str | None = None, endpoint: Endpoint = "completions", system: str | None = None
) -> InputFormat:
    """The format of a file, from its name's extension; the file is not opened.

    Raises `ConfigError` for an unknown extension and for options that contradict each other.
    """
    path = Path(path)
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"{path}: the input's format follows from its extension; {path.suffix!r} is none of {', '.join(_KINDS)}"
        )
    if kind in _TABLES:
        column = "prompt" if column is None else column
    elif column is not None:
        raise ConfigError(f"{path}: has no columns, so --column {column!r} does not apply; only CSV and Parquet have")
    if system is not None and endpoint != "chat":
        raise ConfigError(f"--system needs --endpoint chat; the endpoint here is {endpoint}")
    return InputFormat(path=path, kind=kind, column=column, endpoint=endpoint, system=system)


def table_columns(input_format: InputFormat, names: Sequence[str]) -> list[str]:
    """The columns of a table to read: the prompts, then the custom IDs if the table has them.

    Raises `ConfigError` if the prompt column is missing or a column name is ambiguous.
    """
    path, prompts = input_format.path, str(input_format.column)
    if prompts not in names:
        known = ", ".join(repr(name[: 2 * _MAX_COLUMNS_SHOWN]) for name in names[:_MAX_COLUMNS_SHOWN])
        more = f" and {len(names) - _MAX_COLUMNS_SHOWN} more" if len(names) > _MAX_COLUMNS_SHOWN else ""
        raise ConfigError(f"{path}: has no column {prompts!r}; there are {known}{more} (--column)")
    columns = [prompts, *[name for name in ("custom_id", "id") if name in names and name != prompts][:1]]
    for column in columns:
        if names.count(column) > 1:
            raise ConfigError(f"{path}: has {names.count(column)} columns named {column!r}")
    return columns
