"""Requests from web pages of other origins (CORS): which pages may use the server."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from cppbatch.server.origins import ANY, LOCAL

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_METHODS = "GET, POST, DELETE, OPTIONS"
_RATE_HEADERS = [
    *(f"x-ratelimit-{value}-requests" for value in ("limit", "remaining", "reset")),
    *(f"anthropic-ratelimit-requests-{value}" for value in ("limit", "remaining", "reset")),
]
_EXPOSED_HEADERS = ", ".join(["X-Request-Id", "X-Ignored-Fields", "Retry-After", "retry-after-ms", *_RATE_HEADERS])
"""What pages may read beside the safelisted headers."""
_MAX_AGE = "600"  # seconds for which browsers may cache a preflight response


class CrossOrigin:
    """Adds the CORS headers to the responses of an application, and answers preflight requests for every path.

    `origins`: origins and special values. Browsers may send credentials, because allowed pages are trusted, and any
    page only where the user says so, or where a key that pages do not know is required.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)

    @property
    def allows_all(self) -> bool:
        """Whether any page may use the server."""
        return ANY in self._origins

    @property
    def allows_local(self) -> bool:
        """Whether pages that this machine serves, on any port, may use the server."""
        return LOCAL in self._origins

    def allows(self, origin: str) -> bool:
        """Whether pages of this origin may use the server."""
        scheme, _, _ = origin.partition("://")
        named = self.allows_all or origin in self._origins or f"{scheme}://{ANY}" in self._origins
        return named or (self.allows_local and _is_local(origin))

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """For `Application.on_response_prepare`."""
        # keeps caches from serving one origin's response to another
        varies = response.headers.get(hdrs.VARY)
        response.headers[hdrs.VARY] = f"{varies}, {hdrs.ORIGIN}" if varies else hdrs.ORIGIN
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and self.allows(origin):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED_HEADERS


@web.middleware
async def preflight_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers OPTIONS requests: without a key, which browsers do not send with them, and while the model loads."""
    if request.method != hdrs.METH_OPTIONS:
        return await handler(request)
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
        # Not *, which would not include Authorization.
        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"),
        hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE,
    }
    return web.Response(headers=headers)


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in _LOCAL_HOSTS
    except ValueError:  # not an URL
        return False
