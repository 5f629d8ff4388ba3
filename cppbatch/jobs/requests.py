"""From what stands in an input to the requests of a job."""

from __future__ import annotations

import reprlib
from collections.abc import Collection

from cppbatch.jobs.forms import InputForm
from cppbatch.jobs.hashing import hash64
from cppbatch.jobs.items import Item, Json, Refused

LONGEST_ID = 512
"""Letters of a custom_id."""

_SHOWN = 40
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _SHOWN
_short.maxlevel = 2


class Unusable(Exception):
    """What stands there is no request. `code`: one word for programs; the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Requests:
    """Makes requests of prompts, and checks where they go to."""

    def __init__(self, form: InputForm, urls: Collection[str]) -> None:
        self._form = form
        self._urls = urls

    def check_url(self, url: object) -> str:
        if isinstance(url, str) and url in self._urls:
            return url
        raise Unusable(
            "invalid_url",
            f"url: {shown(url)} is no endpoint of a job; it must be one of {', '.join(sorted(self._urls))}",
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

    def item(self, line: int, name: str | None, prompt: str) -> Item | Refused:
        """The item of a prompt from a text file or a table. `name` is what its cell says, if there is one.

        Bytes that were no UTF-8 stand in both as `surrogateescape` leaves them.
        """
        content = hash64(f"{name or ''}\0{prompt}".encode(errors="surrogateescape"))
        custom_id: str | None = None
        try:
            custom_id = line_name(line) if name is None or not name.strip() else checked_id("custom_id", name)
            if not prompt.strip():
                raise Unusable("empty_prompt", "the prompt is empty")
            url, body = self.of_prompt(checked_text(prompt), {})
        except Unusable as wrong:
            return Refused(line=line, code=wrong.code, message=str(wrong), custom_id=custom_id, content=content)
        return Item(line=line, custom_id=custom_id, url=url, body=body, is_plain=True, content=content)


def line_name(line: int) -> str:
    """The name of an item that has none of its own."""
    return f"line-{line}"


def checked_id(field: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID:
        raise Unusable("invalid_custom_id", f"{field}: {shown(value)} is no string of 1 to {LONGEST_ID} characters")
    if "\0" in value or not _is_unicode(value):
        raise Unusable("invalid_custom_id", f"{field}: {shown(value)} is not text in UTF-8")
    return value


def checked_text(text: str) -> str:
    if "\0" in text or not _is_unicode(text):
        raise Unusable("invalid_text", not_text(text.encode(errors="surrogateescape")))
    return text


def not_text(data: bytes) -> str:
    guess = ", perhaps in UTF-16" if b"\0" in data else ""
    return f"is not text in UTF-8{guess}: {data[:_SHOWN]!r}"


def shown(value: object) -> str:
    """A value in an error's message, in short."""
    return _short.repr(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
