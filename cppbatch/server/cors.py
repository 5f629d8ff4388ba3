"""Lets the web pages of other origins use the server from a browser. Off unless origins are named."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

import aiohttp_cors
from aiohttp import hdrs, web

from cppbatch.errors import ConfigError

_EXPOSED = ("X-Request-Id", "Retry-After")  # what a page may read beside the plain headers
_SECONDS_TO_REMEMBER = 600


def check_origin(origin: str) -> str:
    """Raises `ConfigError` for what browsers never send as their origin."""
    parts = urlsplit(origin)
    if origin != "*" and (not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
        raise ConfigError(f"--cors-origin is {origin!r}; it must be like https://example.org, with no path, or *")
    return origin


def allow_origins(app: web.Application, origins: Iterable[str]) -> None:
    """Answers preflight requests for every route, and adds the headers to what the routes answer."""
    # No credentials: keys come in a header, and a cookie means nothing here.
    options = {"allow_headers": "*", "expose_headers": _EXPOSED, "max_age": _SECONDS_TO_REMEMBER}
    cors = aiohttp_cors.setup(app, defaults=dict.fromkeys(origins, options))
    for route in list(app.router.routes()):
        cors.add(route)
    app.on_response_prepare.append(_vary)


async def _vary(_request: web.Request, response: web.StreamResponse) -> None:
    """A cache must not give one origin the answer to another."""
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
