"""What a job is made of: the lines of its input, and what became of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

Json = dict[str, Any]


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a job."""

    line: int
    """Where it stands in its file, from 1; of a Parquet file, which row it is."""
    custom_id: str
    """Names it in the results; unique within the job."""
    url: str
    """The endpoint that it is for, such as /v1/chat/completions."""
    body: Json
    """What that endpoint is sent."""
    is_plain: bool = False
    """A mere prompt, not a request in OpenAI's form: its result is written in short."""
    content: int
    """A hash of what stands on the line, signed, of 64 bits, by which a line that was edited is known."""


class RejectedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is no request."""

    line: int
    code: str
    """One word for programs, such as invalid_json."""
    message: str
    """What is wrong with it, with the value, for the person who reads it."""
    custom_id: str | None = None
    """If it could be read."""
    content: int


class JobResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint answers to one item."""

    status: int
    """Of HTTP: 200, or that of an error."""
    body: object
    """An object for JSON."""
    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def is_good(self) -> bool:
        """Whether it is an answer, and no error."""
        return self.status < 400


RequestHandler = Callable[[JobRequest], Awaitable[JobResponse]]
"""Has an item answered. What is wrong with the item alone is an answer with an error's status; an exception means that
nothing can be answered any more (the engine is gone), and the item is left for later."""
