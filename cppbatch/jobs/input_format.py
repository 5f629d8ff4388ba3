"""Which kind of file a job reads, and what becomes of the prompts in it."""

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
_MOST_SHOWN = 20


class InputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How an input is read. `detect_input_format` makes one of what a person gave."""

    path: Path
    kind: FileKind
    column: str | None = None
    """Of a table, the column that has the prompts."""
    endpoint: Endpoint = "completions"
    """What a plain prompt is sent to."""
    system: str | None = None
    """What a chat with a plain prompt begins with."""


def detect_input_format(
    path: str | Path, column: str | None = None, endpoint: Endpoint = "completions", system: str | None = None
) -> InputFormat:
    """The form of a file, by its ending; does not look at the file itself.

    Raises `ConfigError` for endings that mean nothing, and options that do not fit.
    """
    path = Path(path)
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"{path}: the kind of an input is known by its ending; {path.suffix!r} is none of {', '.join(_KINDS)}"
        )
    if kind in _TABLES:
        column = "prompt" if column is None else column
    elif column is not None:
        raise ConfigError(f"{path}: has no columns, so {column!r} cannot be one of them (--column); only tables do")
    if system is not None and endpoint != "chat":
        raise ConfigError(f"a system message needs a chat, and prompts go to {endpoint} here (--system, --endpoint)")
    return InputFormat(path=path, kind=kind, column=column, endpoint=endpoint, system=system)


def table_columns(form: InputFormat, names: Sequence[str]) -> list[str]:
    """Which columns of a table are read: that of the prompts, and if there is one that of the items' names.

    Raises `ConfigError` if there are no prompts, or it is not clear which.
    """
    prompts = str(form.column)
    if prompts not in names:
        known = ", ".join(repr(name[: 2 * _MOST_SHOWN]) for name in names[:_MOST_SHOWN])
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        raise ConfigError(f"{form.path}: has no column {prompts!r}; there are {known}{more} (--column)")
    columns = [prompts, *[name for name in ("custom_id", "id") if name in names and name != prompts][:1]]
    for column in columns:
        if names.count(column) > 1:
            raise ConfigError(f"{form.path}: has {names.count(column)} columns that are called {column!r}")
    return columns
