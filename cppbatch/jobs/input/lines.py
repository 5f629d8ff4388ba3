"""Reads requests from JSON Lines files, and prompts from text files with one prompt per line.

A line of JSON is a request in OpenAI's batch format, an object with a prompt, or only a prompt:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}
    {"id": "a", "prompt": "Hello", "max_tokens": 5}
    "Hello"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.errors import NotJsonLines
from cppbatch.jobs.input.format import MAX_LINE_BYTES, InputFormat, LineReader, describe_non_text
from cppbatch.jobs.input.request_builder import (
    LineError,
    RequestBuilder,
    check_custom_id,
    default_custom_id,
    row_id,
    short_repr,
)
from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine, hash64
from cppbatch.json_bounds import excess

_PROMPT_FIELDS = ("prompt", "messages", "input")
_DOCUMENT = re.compile(rb'\s*(\[\s*(?:$|["{\[])|\{\s*$)')
"""The start of an array of texts, objects or arrays, or of an object on several lines."""
_decode = msgspec.json.Decoder().decode


class LineInput:
    """A file with one request per line, parsed by `parse_json_line` or `parse_text_line`. Blank lines are skipped."""

    def __init__(
        self,
        input_format: InputFormat,
        builder: RequestBuilder,
        parse: Callable[[int, bytes, RequestBuilder], JobRequest | RejectedLine],
    ) -> None:
        self._path = input_format.path
        self._lines = LineReader(self._path)
        self._builder = builder
        self._parse = parse

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        parse, builder = self._parse, self._builder
        is_first = parse is parse_json_line
        for number, raw in self._lines:
            line = raw.rstrip(b"\r\n")
            if is_first and line.strip():
                _refuse_document(self._path, line)
                is_first = False
            if len(line) > MAX_LINE_BYTES:
                message = f"is longer than {MAX_LINE_BYTES} bytes, the maximum line length"
                yield RejectedLine(line=number, code="line_too_long", message=message, content_hash=hash64(line))
            elif line and not line.isspace():
                yield parse(number, line, builder)

    def count(self) -> Iterator[int]:
        """Yields 1 for each entry that iterating yields."""
        return (1 for _, raw in self._lines if raw.strip())

    def ids(self) -> Iterator[tuple[int, object]]:
        """The line and the `id` of each plain line of JSON that is named by it."""
        for number, raw in self._lines:
            try:
                found = _decode_ids(raw) if raw.strip() else _Ids()
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # it is rejected, or only a prompt
                continue
            if not self._builder.has_template and (found.url, found.body) != (msgspec.UNSET, msgspec.UNSET):
                return  # requests in OpenAI's format, which have a custom_id
            if found.custom_id is None:
                yield number, found.id

    def close(self) -> None:
        self._lines.close()


class _Ids(msgspec.Struct):
    id: Any = None
    custom_id: Any = None
    url: Any = msgspec.UNSET
    body: Any = msgspec.UNSET


_decode_ids = msgspec.json.Decoder(_Ids).decode


def _refuse_document(path: Path, first_line: bytes) -> None:
    """Raises `NotJsonLines` if this is the first line of one JSON value that is the whole file."""
    if found := _DOCUMENT.match(first_line):
        kind, program = ("array", ".[]") if found[1].startswith(b"[") else ("object", ".")
        reason = f"is a JSON {kind}, but a job reads one JSON value from each line: convert it with jq -c '{program}'"
        raise NotJsonLines(path, reason)


def parse_text_line(number: int, line: bytes, builder: RequestBuilder) -> JobRequest | RejectedLine:
    """The request for a line that is a prompt."""
    return builder.from_row(number, None, {"prompt": line.decode(errors="surrogateescape")})


def parse_json_line(number: int, line: bytes, builder: RequestBuilder) -> JobRequest | RejectedLine:
    """The request for a line of JSON."""
    content_hash = hash64(line)
    custom_id: str | None = None
    try:
        record = _decode_record(line)
        is_plain = builder.has_template or ("body" not in record and "url" not in record)
        if builder.only_prompts and not is_plain:
            message = "is a request in OpenAI's format, and its result cannot be a table row: use a .jsonl output"
            raise LineError("invalid_line", message)
        if is_plain:
            custom_id = _plain_custom_id(record, number, builder)
            url, body = _plain_request(record, builder)
        else:
            custom_id = _custom_id(record)
            url, body = _request(record, builder)
    except LineError as error:
        return RejectedLine(
            line=number, code=error.code, message=str(error), custom_id=custom_id, content_hash=content_hash
        )
    return JobRequest(
        line=number, custom_id=custom_id, url=url, body=body, is_plain=is_plain, content_hash=content_hash
    )


def _decode_record(line: bytes) -> Json:
    if too_much := excess(line):
        raise LineError("invalid_json", too_much)
    try:
        record: Any = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError("invalid_json", _decode_failure(line, error)) from None
    if isinstance(record, str):
        return {"prompt": record}
    if not isinstance(record, dict):
        raise LineError("invalid_line", f"{short_repr(record)} is neither an object nor a string")
    return record


def _decode_failure(line: bytes, error: Exception) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return describe_non_text(line)
    if "\0" in text:
        return describe_non_text(line)
    return f"is not valid JSON: {error}: {short_repr(text)}"


def _custom_id(record: Json) -> str:
    if "custom_id" not in record:
        raise LineError("missing_custom_id", "custom_id: is required; it identifies the result")
    return check_custom_id("custom_id", record["custom_id"])


def _request(record: Json, builder: RequestBuilder) -> tuple[str, Json]:
    method = record.get("method", "POST")
    if not isinstance(method, str) or method.upper() != "POST":
        raise LineError("invalid_method", f"method: is {short_repr(method)}; it must be POST")
    if "url" not in record:
        raise LineError("invalid_url", "url: is required")
    url = builder.check_url(record["url"])
    if "body" not in record:
        raise LineError("missing_body", "body: is required; it is the request body for the endpoint")
    body = record["body"]
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body: {short_repr(body)} is not an object")
    return url, body


def _plain_custom_id(record: Json, number: int, builder: RequestBuilder) -> str:
    """The ID of a plain line, which may be an integer, as in data sets."""
    for field in builder.id_fields:
        if (value := record.get(field)) is not None:
            return row_id(field, value)
    if builder.id_column is not None:
        raise LineError(
            "missing_custom_id", f"{builder.id_column}: is required; it identifies the result (--id-column)"
        )
    return default_custom_id(number)


def _plain_request(record: Json, builder: RequestBuilder) -> tuple[str, Json]:
    if builder.has_template:
        return builder.url_and_body(builder.prompt_of(record), {})
    present = [field for field in _PROMPT_FIELDS if field in record]
    if len(present) != 1:
        found = " and ".join(present) or (
            f"only {', '.join(map(short_repr, list(record)[:8]))}" if record else "nothing"
        )
        raise LineError(
            "invalid_line", f"has {found}; it must have a url and a body, or one of {', '.join(_PROMPT_FIELDS)}"
        )
    ids = ("custom_id", "id", *builder.id_fields)
    fields = {field: value for field, value in record.items() if field not in ids}
    if "messages" in record:
        return builder.check_url("/v1/chat/completions"), fields
    if "input" in record:
        return builder.check_url("/v1/embeddings"), fields
    prompt = fields["prompt"]
    if isinstance(prompt, list):
        return builder.check_url("/v1/completions"), fields
    if not isinstance(prompt, str):
        raise LineError("invalid_line", f"prompt: {short_repr(prompt)} is neither a string nor a list")
    del fields["prompt"]
    return builder.url_and_body(prompt, fields)
