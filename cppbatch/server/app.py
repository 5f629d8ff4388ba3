"""The aiohttp application."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Iterator

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cppbatch.cluster.client import EngineClient
from cppbatch.server.errors import error_middleware, error_object, json_response
from cppbatch.server.routes import CLIENT, STARTED, routes


class InFlight:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self.n = 0
        self.draining = False
        """No new requests: the server is going down."""
        self._none_left = asyncio.Event()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Counts a request for as long as it is being answered."""
        self.n += 1
        try:
            yield
        finally:
            self.n -= 1
            if self.n == 0:
                self._none_left.set()

    async def drain(self) -> None:
        """Waits until the last of them is answered."""
        self.draining = True
        while self.n:
            self._none_left.clear()
            await self._none_left.wait()


IN_FLIGHT = web.AppKey("in_flight", InFlight)

_LARGEST_BODY = 16 << 20  # bytes; 16 MiB hold a prompt of millions of tokens
_OPEN_PATHS = frozenset({"/health"})


def create_app(client: EngineClient, *, api_key: str | None = None) -> web.Application:
    """The application that serves this engine. With an `api_key`, all but /health wants it as a bearer token."""
    keys = [_key_middleware(api_key)] if api_key else []
    middlewares: list[Middleware] = [error_middleware, *keys, availability_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=_LARGEST_BODY)
    app[CLIENT] = client
    app[IN_FLIGHT] = InFlight()
    app[STARTED] = int(time.time())
    app.add_routes(routes)
    return app


@web.middleware
async def availability_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Says why there is no service: the model is still loading, or the server is going down."""
    state = request.app[CLIENT].health()
    if request.path in _OPEN_PATHS:
        return await handler(request)
    if state.status == "loading":
        return _unavailable(f"the model is still loading ({state.progress:.0%}); try again soon", "loading")
    if request.app[IN_FLIGHT].draining:
        return _unavailable("the server is going down", "shutting_down")
    with request.app[IN_FLIGHT].one():
        return await handler(request)


def _unavailable(message: str, code: str) -> web.Response:
    response = json_response(error_object(message, "server_error", code=code), 503)
    response.headers["Retry-After"] = "1"
    return response


def _key_middleware(api_key: str) -> Middleware:
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path in _OPEN_PATHS or hmac.compare_digest(given, expected):
            return await handler(request)
        message = "this server wants its API key: Authorization: Bearer KEY"
        return json_response(error_object(message, "authentication_error", code="invalid_api_key"), 401)

    return check_key
