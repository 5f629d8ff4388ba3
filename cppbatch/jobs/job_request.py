"""The requests of a batch job, one for each line of its input, and the responses to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

import msgspec

Json = dict[str, Any]


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a job."""

    line: int
    """Line number in the input file, from 1; for a Parquet file the row number."""
    custom_id: str
    """The client's name for the request, unique within the job; the result carries it."""
    url: str
    """Endpoint, for example /v1/chat/completions."""
    body: Json
    """The JSON body for that endpoint."""
    is_plain: bool = False
    """Whether the line has a prompt instead of a request in OpenAI's batch format. Its result uses the short form."""
    content_hash: int
    """`hash64` of the line. A different hash means that the input was edited after the line was answered."""

    def rejected(self, code: str, message: str) -> RejectedLine:
        """The request as a line with this error."""
        return RejectedLine(
            line=self.line, code=code, message=message, custom_id=self.custom_id, content_hash=self.content_hash
        )


class RejectedLine(msgspec.Struct, frozen=True, kw_only=True):
    """An input line that is not a valid request."""

    line: int
    code: str
    """Machine-readable error code, for example invalid_json."""
    message: str
    """Human-readable error message that includes the wrong value."""
    custom_id: str | None = None
    """None if the line does not have one or it cannot be read."""
    content_hash: int


class JobResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint's response to one request."""

    status: int
    """HTTP status code."""
    body: object
    """Encodes to a JSON object."""
    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def is_ok(self) -> bool:
        """Whether the response is not an error."""
        return self.status < 400


RequestHandler = Callable[[JobRequest], Awaitable[JobResponse]]
"""Runs one request. An error of the request is returned as a response with an error status. An exception means that
requests can no longer run (the engine is closed): the job stops and leaves the request unanswered."""


def hash64(data: bytes) -> int:
    """A 64-bit hash of `data` as a signed integer, which fits SQLite's INTEGER."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
