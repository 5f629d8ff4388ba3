"""Whether the server takes requests: while the model loads, while it serves, and on the way down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from cppbatch.errors import EngineClosed
from cppbatch.server.api_errors import ApiError, error_response, json_response
from cppbatch.server.serving import SERVING


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

    async def drain(self, seconds: float) -> int:
        """Takes no new requests and waits until the last is answered, but no longer than this; says how many are left.

        A timeout is no error here: the caller knows what to do with those.
        """
        self.draining = True
        if self.n:
            self._none_left.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), seconds)
        return self.n


IN_FLIGHT = web.AppKey("in_flight", InFlight)

_ABOUT_THE_SERVER = frozenset({"/health", "/v1/health", "/ready", "/metrics"})  # answered in any state

routes = web.RouteTableDef()


@routes.get("/health")
@routes.get("/v1/health")
async def health(request: web.Request) -> web.Response:
    """503 while the model loads (with how far it is) or when the engine is no more; else 200, also on the way down."""
    state = request.app[SERVING].client.health()
    return json_response(state, 200 if state.takes_requests else 503)


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """200 when a request that comes now is taken; else 503 with the state."""
    state = request.app[SERVING].client.health()
    draining = request.app[IN_FLIGHT].draining
    is_ready = state.takes_requests and not draining
    status = "draining" if draining else state.status
    return json_response({"ready": is_ready, "status": status}, 200 if is_ready else 503)


@web.middleware
async def availability_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Says why there is no service: the model is still loading, the engine is no more, or the server is going down."""
    if request.path in _ABOUT_THE_SERVER or request.method == hdrs.METH_OPTIONS:
        return await handler(request)
    state = request.app[SERVING].client.health()
    in_flight = request.app[IN_FLIGHT]
    if state.status == "loading":
        return _unavailable(request, f"the model is still loading ({state.progress:.0%}); try again soon", "loading")
    if request.method in (hdrs.METH_GET, hdrs.METH_HEAD):  # looking does no harm
        return await handler(request)
    if in_flight.draining:
        return _unavailable(request, "the server is going down", "shutting_down")
    if not state.takes_requests:
        raise EngineClosed(f"the engine takes no requests: it is {state.status}")
    with in_flight.one():
        return await handler(request)


def _unavailable(request: web.Request, message: str, code: str) -> web.Response:
    response = error_response(request, ApiError(503, message, "server_error", code=code))
    response.headers["Retry-After"] = "1"
    return response
