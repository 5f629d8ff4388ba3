"""The format of a job's input file, and how the prompts in it become requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from cppbatch.errors import ConfigError
from cppbatch.jobs.prompt_template import PromptTemplate

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
    """The column with the prompts; None for files without columns, and with a template."""
    template: str | None = None
    """The text of a `PromptTemplate`, which makes a prompt of each row."""
    id_column: str | None = None
    """The column with the custom IDs; None: custom_id or id, if there is one."""
    only_prompts: bool = False
    """Requests in OpenAI's format are rejected: their results are not rows of a table."""
    endpoint: Endpoint = "completions"
    """The endpoint that plain prompts are sent to."""
    system: str | None = None
    """The system message of chats made from plain prompts."""


def detect_input_format(
    path: str | Path,
    column: str | None = None,
    endpoint: Endpoint = "completions",
    system: str | None = None,
    *,
    template: str | None = None,
    id_column: str | None = None,
    only_prompts: bool = False,
) -> InputFormat:
    """The format of a file, from its name's extension; the file is not opened.

    Raises `ConfigError` for an unknown extension and for options that contradict each other.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise ConfigError(f"{path}: is a folder; give a file")
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"{path}: unknown input format {path.suffix!r}; the extension must be one of {', '.join(_KINDS)}"
        )
    if template is not None:
        fields = PromptTemplate(template).fields
        if column is not None:
            raise ConfigError("--column and --template cannot be combined; give only one of them")
        if kind == "txt" and fields != ("prompt",):
            raise ConfigError(f"{path}: has no columns; in --template, use {{prompt}} for the line")
    elif kind in _TABLES:
        column = "prompt" if column is None else column
    elif column is not None:
        raise ConfigError(f"{path}: has no columns, so --column {column!r} does not apply; it is for CSV and Parquet")
    if id_column is not None and kind == "txt":
        raise ConfigError(f"{path}: has no columns, so --id-column {id_column!r} does not apply")
    if system is not None and endpoint != "chat":
        raise ConfigError(f"--system requires --endpoint chat; the endpoint is {endpoint}")
    return InputFormat(
        path=path,
        kind=kind,
        column=column,
        template=template,
        id_column=id_column,
        only_prompts=only_prompts,
        endpoint=endpoint,
        system=system,
    )


class TableColumns(NamedTuple):
    """The columns of a table that requests are made of."""

    prompt: tuple[str, ...]
    """The one with the prompts, or those that the template names."""
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
            known = ", ".join(repr(name[: 2 * _MAX_COLUMNS_SHOWN]) for name in names[:_MAX_COLUMNS_SHOWN])
            more = f" and {len(names) - _MAX_COLUMNS_SHOWN} more" if len(names) > _MAX_COLUMNS_SHOWN else ""
            raise ConfigError(f"{path}: column {column!r} not found; available: {known}{more} ({flag})")
    others = (name for name in ("custom_id", "id") if name in names and (template is not None or name not in prompt))
    custom_id = id_column or next(others, None)
    for used in (*prompt, *filter(None, [custom_id])):
        if names.count(used) > 1:
            raise ConfigError(f"{path}: has {names.count(used)} columns named {used!r}")
    return TableColumns(prompt, custom_id)
