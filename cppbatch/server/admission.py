"""The last steps before a request is worked on: its body is read, and it takes one of the places there are."""

from __future__ import annotations

import contextlib

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from cppbatch.errors import InvalidRequest
from cppbatch.server.connections import connection_of, reading
from cppbatch.server.keys import KEY
from cppbatch.server.limits import Slots
from cppbatch.server.serving import SERVING

SLOTS = web.AppKey("slots", Slots)

_WITHOUT_BODY = (hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS)
_IN_PIECES = ((hdrs.METH_POST, "/v1/files"),)  # bodies that are for the disk: their handlers read them


@web.middleware
async def admission_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses bodies that are too large, and more requests at once than the limits allow.

    A client that is slow to send its body takes nobody's place meanwhile.
    """
    connection = connection_of(request)
    with contextlib.ExitStack() as held:
        if request.method not in _WITHOUT_BODY:
            if (encoding := request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower()) != "identity":
                raise InvalidRequest("Content-Encoding", f"is {encoding!r:.40}; send the body as it is")
            if (request.method, request.path) not in _IN_PIECES:
                with reading(request):
                    await _read_body(request, request.app[SERVING].limits.max_body_mb)
            held.enter_context(request.app[SLOTS].one(request.get(KEY) or request.remote or ""))
        if connection:
            held.enter_context(connection.answering())
        return await handler(request)


async def _read_body(request: web.Request, most_mb: int) -> None:
    """aiohttp keeps it for whoever asks again. A body that says its length is refused unread."""
    most = most_mb << 20
    message = f"the request's body is larger than {most_mb} MiB, the most that this server takes (--max-body-mb)"
    if request.content_length is not None and request.content_length > most:
        raise web.HTTPRequestEntityTooLarge(most, request.content_length, text=message)
    try:
        await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        error.text = message
        raise
    except web.RequestPayloadError as error:
        reason = str(error).splitlines()[-1].strip()  # aiohttp puts a status and "message:" before it
        raise InvalidRequest("body", f"cannot be read: {reason}") from error
