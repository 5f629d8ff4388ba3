"""The aiohttp application."""

from __future__ import annotations

import hmac
import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cppbatch.cluster.client import EngineClient
from cppbatch.server.errors import error_middleware, error_object, json_response
from cppbatch.server.routes import CLIENT, STARTED, routes

DRAINING = web.AppKey("draining", list[bool])
"""Not empty once the server is going down (a list, because a running app's own keys cannot be set)."""

_LARGEST_BODY = 16 << 20  # bytes; 16 MiB hold a prompt of millions of tokens
_OPEN_PATHS = frozenset({"/health"})


def create_app(client: EngineClient, *, api_key: str | None = None) -> web.Application:
    """The application that serves this engine. With an `api_key`, all but /health wants it as a bearer token."""
    keys = [_key_middleware(api_key)] if api_key else []
    middlewares: list[Middleware] = [error_middleware, *keys, availability_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=_LARGEST_BODY)
    app[CLIENT] = client
    app[DRAINING] = []
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
    if request.app[DRAINING]:
        return _unavailable("the server is going down", "shutting_down")
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
