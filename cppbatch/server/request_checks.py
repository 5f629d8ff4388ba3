"""Refuses requests that the server cannot serve now, exceed the body size, or exceed the limit on concurrency."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from cppbatch.errors import EngineClosed, InvalidRequest
from cppbatch.server.auth.key_usage import KEY_USAGE
from cppbatch.server.auth.keys import KEY
from cppbatch.server.http.api_errors import error_response
from cppbatch.server.http.connections import connection_of, reading
from cppbatch.server.http.error_formats import ApiError
from cppbatch.server.models.served import MODELS
from cppbatch.server.web_page import is_page

_ALWAYS_SERVED = frozenset({"/health", "/v1/health", "/ready", "/metrics"})
_WITHOUT_BODY = (hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS)
_ENDS_WORK = frozenset({"/generate/batch/cancel"})  # takes no slot: a key with one slot can cancel its request
STREAMED_BODIES = ((hdrs.METH_POST, "/v1/files"),)  # their handlers write them to disk while reading


class InFlight:
    """Counts the HTTP requests in progress that start work, so that a shutdown can wait for them."""

    def __init__(self) -> None:
        self.n = 0
        self.draining = False
        """The server is shutting down and does not accept new requests."""
        self._none_left = asyncio.Event()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Counts a request while it is in progress."""
        self.n += 1
        try:
            yield
        finally:
            self.n -= 1
            if self.n == 0:
                self._none_left.set()

    async def drain(self, seconds: float) -> int:
        """Accepts no new requests, and waits up to `seconds` for the running ones. Returns the number of requests still
        running."""
        self.draining = True
        if self.n:
            self._none_left.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), seconds)
        return self.n


IN_FLIGHT = web.AppKey("in_flight", InFlight)


@web.middleware
async def availability_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests with status 503 while the model loads, after the engine has failed, and during shutdown."""
    if request.path in _ALWAYS_SERVED or is_page(request.path) or request.method == hdrs.METH_OPTIONS:
        return await handler(request)
    state = request.app[MODELS].health()
    in_flight = request.app[IN_FLIGHT]
    if state.status == "loading":
        return _unavailable(request, f"the model is still loading ({state.progress:.0%}); try again soon", "loading")
    if request.method in (hdrs.METH_GET, hdrs.METH_HEAD):  # start no work, so also served in the states below
        return await handler(request)
    if in_flight.draining:
        return _unavailable(request, "the server is shutting down", "shutting_down")
    if not state.takes_requests:
        raise EngineClosed(state.refusal)
    with in_flight.one():
        return await handler(request)


def _unavailable(request: web.Request, message: str, code: str) -> web.Response:
    response = error_response(request, ApiError(503, message, "server_error", code=code))
    response.headers["Retry-After"] = "1"
    return response


@web.middleware
async def limits_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reads the body. Refuses bodies that are too large, requests for a model that their key does not allow, and
    requests beyond the limits on concurrency and on the key's rate.

    A request takes a slot only once its body has been read, so a slow client holds no slot.
    """
    connection = connection_of(request)
    with contextlib.ExitStack() as held:
        if request.method not in _WITHOUT_BODY:
            if (encoding := request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower()) != "identity":
                raise InvalidRequest("Content-Encoding", f"is {encoding!r:.40}; send the body uncompressed")
            if (request.method, request.path) not in STREAMED_BODIES:
                with reading(request):
                    await _read_body(request, request.app[MODELS].settings.limits.max_body_mb)
            if request.path not in _ENDS_WORK:
                held.enter_context(request.app[KEY_USAGE].one(request))
            if rules := request.get(KEY):
                request.app[MODELS].check_key(rules)
        if connection:
            held.enter_context(connection.answering())
        return await handler(request)


async def _read_body(request: web.Request, max_mb: int) -> None:
    """Reads the body, which aiohttp caches. Refuses a body with too large a Content-Length without reading it."""
    max_bytes = max_mb << 20
    message = f"the request body exceeds {max_mb} MiB, the limit of this server (--max-body-mb)"
    if request.content_length is not None and request.content_length > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, request.content_length, text=message)
    try:
        await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        error.text = message
        raise
    except web.RequestPayloadError as error:
        reason = str(error).splitlines()[-1].strip()  # aiohttp puts a status and "message:" before it
        raise InvalidRequest("body", f"cannot be read: {reason}") from error
