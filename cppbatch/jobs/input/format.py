"""The format of a job's input file: lines, prompt templates, and the requests built from them."""

from __future__ import annotations

import math
import os
import reprlib
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from cppbatch.errors import ConfigError, name_first
from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine, hash64
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
            known = name_first([repr(name[:_MAX_SHOWN]) for name in names], 20)
            raise ConfigError(f"{path}: column {column!r} not found; available: {known} ({flag})")
    others = (name for name in auto_id_columns(input_format) if name in names and (template or name not in prompt))
    custom_id = id_column or next(others, None)
    for used in (*prompt, *filter(None, [custom_id])):
        if names.count(used) > 1:
            raise ConfigError(f"{path}: has {names.count(used)} columns named {used!r}")
    return TableColumns(prompt, custom_id)


# --- prompt template -------------------------------------------------------------------------------------------------
# Builds prompts from the columns of a table: `Classify: {text}`.


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


# --- request builder -------------------------------------------------------------------------------------------------
# Builds a job's requests from prompts, and validates the contents of input lines.


MAX_CUSTOM_ID_LENGTH = 512
"""In characters."""

_MAX_SHOWN = 40
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _MAX_SHOWN
_short.maxlevel = 2


class LineError(Exception):
    """A line is not a valid request. `code` is machine-readable, the message human-readable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestBuilder:
    """Builds requests from prompts, and checks that their endpoints are allowed."""

    def __init__(self, input_format: InputFormat, urls: Collection[str]) -> None:
        """`urls`: the allowed endpoints."""
        self._format = input_format
        self._urls = urls
        self._template = PromptTemplate(input_format.template) if input_format.template is not None else None

    @property
    def has_template(self) -> bool:
        """Whether prompts are built from the columns of each row."""
        return self._template is not None

    @property
    def only_prompts(self) -> bool:
        """Whether requests in OpenAI's format are rejected."""
        return self._format.only_prompts

    @property
    def id_column(self) -> str | None:
        """The field with the custom ID of a row; None: one of `id_fields`."""
        return self._format.id_column

    @property
    def id_fields(self) -> tuple[str, ...]:
        """The fields that may have the custom ID of a plain line, the first choice first."""
        return auto_id_columns(self._format) if self.id_column is None else (self.id_column,)

    def prompt_of(self, values: Mapping[str, object]) -> str:
        """The prompt that the template creates from a row. Raises `LineError`."""
        assert self._template
        try:
            return self._template.render(values)
        except MissingField as error:
            raise LineError("missing_field", str(error)) from None

    def from_row(self, line: int, custom_id: str | None, values: Mapping[str, object]) -> JobRequest | RejectedLine:
        """The request for a row of a table, built from the template or from its only value."""
        if self._template is None:
            (prompt,) = values.values()
            return self.from_prompt(line, custom_id, field_text(prompt))
        try:
            return self.from_prompt(line, custom_id, self.prompt_of(values))
        except LineError as error:
            content_hash = hash64(repr((custom_id, values)).encode(errors="surrogateescape"))
            return RejectedLine(
                line=line, code=error.code, message=str(error), custom_id=custom_id, content_hash=content_hash
            )

    def from_file(self, line: int, name: str, text: str, content_hash: int) -> JobRequest:
        """The request for a file that is one prompt. Raises `LineError`."""
        if not text.strip():
            raise LineError("empty_prompt", "the file is empty")
        prompt = text if self._template is None else self._template.render({"text": text, "file": name})
        custom_id = check_custom_id("the name of the file", name)
        url, body = self.url_and_body(check_text(prompt), {})
        return JobRequest(line=line, custom_id=custom_id, url=url, body=body, is_plain=True, content_hash=content_hash)

    def check_url(self, url: object) -> str:
        """Returns `url`. Raises `LineError` if it is not an allowed endpoint."""
        if isinstance(url, str) and url in self._urls:
            return url
        raise LineError(
            "invalid_url",
            f"url: {short_repr(url)} is not supported in batch jobs; it must be one of {', '.join(sorted(self._urls))}",
        )

    def url_and_body(self, prompt: str, extra_fields: Json) -> tuple[str, Json]:
        """The URL and the JSON body for a plain prompt; `extra_fields` are added to the body."""
        input_format = self._format
        if input_format.endpoint == "completions":
            return self.check_url("/v1/completions"), {"prompt": prompt, **extra_fields}
        if input_format.endpoint == "embeddings":
            return self.check_url("/v1/embeddings"), {"input": prompt, **extra_fields}
        messages = [{"role": "user", "content": prompt}]
        if input_format.system is not None:
            messages.insert(0, {"role": "system", "content": input_format.system})
        return self.check_url("/v1/chat/completions"), {"messages": messages, **extra_fields}

    def from_prompt(self, line: int, custom_id: str | None, prompt: str) -> JobRequest | RejectedLine:
        """The request for a prompt from a text file or a table. `custom_id` is None without such a column.

        Both strings may contain `surrogateescape` characters for bytes that are not valid UTF-8, which are rejected.
        """
        content_hash = hash64(f"{custom_id or ''}\0{prompt}".encode(errors="surrogateescape"))
        checked_id: str | None = None
        try:
            has_id = custom_id is not None and custom_id.strip()
            checked_id = check_custom_id("custom_id", custom_id) if has_id else default_custom_id(line)
            if not prompt.strip():
                raise LineError("empty_prompt", "the prompt is empty")
            url, body = self.url_and_body(check_text(prompt), {})
        except LineError as error:
            return RejectedLine(
                line=line, code=error.code, message=str(error), custom_id=checked_id, content_hash=content_hash
            )
        return JobRequest(line=line, custom_id=checked_id, url=url, body=body, is_plain=True, content_hash=content_hash)


def default_custom_id(line: int) -> str:
    """The custom ID of a plain prompt without one."""
    return f"line-{line}"


def check_custom_id(field: str, value: object) -> str:
    """Returns `value`. Raises `LineError` unless it is a valid string of valid length."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID_LENGTH:
        raise LineError(
            "invalid_custom_id",
            f"{field}: {short_repr(value)} is not a string of 1 to {MAX_CUSTOM_ID_LENGTH} characters",
        )
    if "\0" in value or not is_unicode(value):
        raise LineError("invalid_custom_id", f"{field}: {short_repr(value)} is not UTF-8 text")
    return value


def row_id(field: str, value: object) -> str:
    """The custom ID of a row, which may be an integer. Raises `LineError`."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return check_custom_id(field, str(value) if is_number else value)


def check_text(text: str) -> str:
    """Returns `text`. Raises `LineError` if it contains null characters or was not valid UTF-8."""
    if "\0" in text or not is_unicode(text):
        raise LineError("invalid_text", describe_non_text(text.encode(errors="surrogateescape")))
    return text


def describe_non_text(data: bytes) -> str:
    """The error message for bytes that are not text."""
    guess = ", perhaps UTF-16" if b"\0" in data else ""
    return f"is not UTF-8 text{guess}: {data[:_MAX_SHOWN]!r}"


def short_repr(value: object) -> str:
    """A shortened `repr` for error messages."""
    return _short.repr(value)


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: it has no bytes that are not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- line reader -----------------------------------------------------------------------------------------------------
# Reads a file line by line with bounded memory, whatever the length of the file and of its lines.


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
