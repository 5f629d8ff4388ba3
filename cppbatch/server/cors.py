"""Cross-origin requests from web pages. Off unless origins are given."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

import aiohttp_cors
from aiohttp import hdrs, web

from cppbatch.errors import ConfigError

_EXPOSED_HEADERS = ("X-Request-Id", "X-Ignored-Fields", "Retry-After")
"""What pages may read beside the safelisted headers."""
_MAX_AGE = 600  # seconds for which browsers may cache a preflight response


def check_origin(origin: str) -> str:
    """Raises `ConfigError` for a string that browsers never send as an origin."""
    parts = urlsplit(origin)
    if origin != "*" and (not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
        raise ConfigError(f"--cors-origin is {origin!r}; it must be like https://example.org, with no path, or *")
    return origin


def allow_origins(app: web.Application, origins: Iterable[str]) -> None:
    """Answers preflight requests of every route, and adds the CORS headers to its responses."""
    # No credentials: API keys come in a header, and cookies are not used.
    options = {"allow_headers": "*", "expose_headers": _EXPOSED_HEADERS, "max_age": _MAX_AGE}
    cors = aiohttp_cors.setup(app, defaults=dict.fromkeys(origins, options))
    for route in list(app.router.routes()):
        cors.add(route)
    app.on_response_prepare.append(_vary)


async def _vary(_request: web.Request, response: web.StreamResponse) -> None:
    """Keeps caches from serving one origin's response to another."""
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
