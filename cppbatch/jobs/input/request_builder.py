"""Builds a job's requests from prompts, and validates the contents of input lines."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping

from cppbatch.jobs.input.format import (
    MAX_SHOWN,
    InputFormat,
    MissingField,
    PromptTemplate,
    auto_id_columns,
    describe_non_text,
    field_text,
    is_unicode,
)
from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine, hash64

MAX_CUSTOM_ID_LENGTH = 512
"""In characters."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = MAX_SHOWN
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


def short_repr(value: object) -> str:
    """A shortened `repr` for error messages."""
    return _short.repr(value)
