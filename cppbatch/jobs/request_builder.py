"""From what stands in an input to the requests of a job."""

from __future__ import annotations

import reprlib
from collections.abc import Collection

from cppbatch.jobs.hashing import hash64
from cppbatch.jobs.input_format import InputFormat
from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine

MAX_CUSTOM_ID_LENGTH = 512
"""Letters of a custom_id."""

_SHOWN = 40
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _SHOWN
_short.maxlevel = 2


class LineError(Exception):
    """What stands there is no request. `code`: one word for programs; the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestBuilder:
    """Makes requests of prompts, and checks where they go to."""

    def __init__(self, form: InputFormat, urls: Collection[str]) -> None:
        self._form = form
        self._urls = urls

    def check_url(self, url: object) -> str:
        if isinstance(url, str) and url in self._urls:
            return url
        raise LineError(
            "invalid_url",
            f"url: {short_repr(url)} is no endpoint of a job; it must be one of {', '.join(sorted(self._urls))}",
        )

    def of_prompt(self, prompt: str, others: Json) -> tuple[str, Json]:
        """The url and the body of a plain prompt; `others` are further fields of the body."""
        form = self._form
        if form.endpoint == "completions":
            return self.check_url("/v1/completions"), {"prompt": prompt, **others}
        if form.endpoint == "embeddings":
            return self.check_url("/v1/embeddings"), {"input": prompt, **others}
        messages = [{"role": "user", "content": prompt}]
        if form.system is not None:
            messages.insert(0, {"role": "system", "content": form.system})
        return self.check_url("/v1/chat/completions"), {"messages": messages, **others}

    def item(self, line: int, name: str | None, prompt: str) -> JobRequest | RejectedLine:
        """The item of a prompt from a text file or a table. `name` is what its cell says, if there is one.

        Bytes that were no UTF-8 stand in both as `surrogateescape` leaves them.
        """
        content = hash64(f"{name or ''}\0{prompt}".encode(errors="surrogateescape"))
        custom_id: str | None = None
        try:
            custom_id = (
                default_custom_id(line) if name is None or not name.strip() else check_custom_id("custom_id", name)
            )
            if not prompt.strip():
                raise LineError("empty_prompt", "the prompt is empty")
            url, body = self.of_prompt(check_text(prompt), {})
        except LineError as wrong:
            return RejectedLine(line=line, code=wrong.code, message=str(wrong), custom_id=custom_id, content=content)
        return JobRequest(line=line, custom_id=custom_id, url=url, body=body, is_plain=True, content=content)


def default_custom_id(line: int) -> str:
    """The name of an item that has none of its own."""
    return f"line-{line}"


def check_custom_id(field: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID_LENGTH:
        raise LineError(
            "invalid_custom_id", f"{field}: {short_repr(value)} is no string of 1 to {MAX_CUSTOM_ID_LENGTH} characters"
        )
    if "\0" in value or not _is_unicode(value):
        raise LineError("invalid_custom_id", f"{field}: {short_repr(value)} is not text in UTF-8")
    return value


def check_text(text: str) -> str:
    if "\0" in text or not _is_unicode(text):
        raise LineError("invalid_text", describe_non_text(text.encode(errors="surrogateescape")))
    return text


def describe_non_text(data: bytes) -> str:
    guess = ", perhaps in UTF-16" if b"\0" in data else ""
    return f"is not text in UTF-8{guess}: {data[:_SHOWN]!r}"


def short_repr(value: object) -> str:
    """A value in an error's message, in short."""
    return _short.repr(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
