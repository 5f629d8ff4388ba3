"""What went wrong with a request, before it takes the shape that an API family gives its errors."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """An error as HTTP and OpenAI tell it; other families make theirs of it."""

    status: int
    """Of the HTTP answer."""
    message: str
    kind: str
    """OpenAI's `type`: invalid_request_error, authentication_error, rate_limit_error or server_error."""
    param: str | None = None
    """The field at fault."""
    code: str | None = None
