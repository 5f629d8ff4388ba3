"""API keys: which requests are authorised, and the short label of each key in the logs."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from cppbatch.errors import ConfigError
from cppbatch.server.api_errors import ApiError, error_response

KEY = web.RequestKey("api_key", str)
"""`request[KEY]`: the label of the request's key; absent when the server requires no keys."""

OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready"})

_USABLE = re.compile(r"[\x21-\x7e]+")  # characters that a header can contain unescaped
_LABEL_LENGTH = 8


class Keys:
    """The valid keys. Only their digests are stored."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Raises `ConfigError` for a key that no client could send; the message does not contain the key."""
        self._digests: list[bytes] = []
        for i, key in enumerate(keys, 1):
            if not _USABLE.fullmatch(key):
                raise ConfigError(f"API key {i} is empty, or has spaces or characters other than visible ASCII")
            self._digests.append(_digest(key))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def label_of(self, given: str) -> str | None:
        """The label of a valid key, otherwise None. Takes the same time for every key."""
        digest, found = _digest(given), False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return digest.hex()[:_LABEL_LENGTH] if found else None


def read_keys(path: str) -> list[str]:
    """Reads keys from a file, one per line. Skips empty lines and lines that begin with #. Raises `ConfigError`."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file in UTF-8"
        raise ConfigError(f"cannot read the API keys in {path} ({reason})") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ConfigError(f"there is no API key in {path}; write one a line, or leave --api-key-file out")
    return keys


def key_middleware(keys: Keys) -> Middleware:
    """Refuses requests without a valid key, except for `OPEN_PATHS`."""

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        for given in _given(request):
            if label := keys.label_of(given):
                request[KEY] = label
        if KEY in request or request.path in OPEN_PATHS:
            return await handler(request)
        message = "this server wants its API key: Authorization: Bearer KEY"
        return error_response(request, ApiError(401, message, "authentication_error", code="invalid_api_key"))

    return check_key


def _given(request: web.Request) -> list[str]:
    """The keys of a request: a bearer token as sent by OpenAI's clients, and `x-api-key` as sent by Anthropic's."""
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    alone = request.headers.get("x-api-key")
    return [*([token.strip()] if scheme.lower() == "bearer" else []), *([alone] if alone is not None else [])]


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
