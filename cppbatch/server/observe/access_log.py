"""Request ids, and a log line for each request."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from cppbatch.server.auth.keys import KEY
from cppbatch.server.observe.log_setup import access_log, current_id
from cppbatch.server.web_page import is_page

_HEADER = "X-Request-Id"
_ANTHROPIC_HEADER = "request-id"  # Anthropic's clients read this one
_ID = web.RequestKey("request_id", str)
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_POLLED = frozenset({"/health", "/v1/health", "/ready"})  # by load balancers, every few seconds


def request_id(request: web.Request) -> str:
    """The id of a request: the client's `X-Request-Id` if it is printable, otherwise a new one."""
    if _ID not in request:
        given = request.headers.get(_HEADER, "")
        request[_ID] = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
    return request[_ID]


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For `Application.on_response_prepare`: adds the request's id to every response."""
    response.headers[_HEADER] = response.headers[_ANTHROPIC_HEADER] = request_id(request)


@web.middleware
async def access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Logs each request once it has been answered or its client has closed the connection."""
    current_id.set(request_id(request))  # aiohttp handles each request in its own context
    started = time.perf_counter()
    status, n_bytes = 500, None
    try:
        response = await handler(request)
        status = response.status
        n_bytes = response.content_length  # None for a stream
        return response
    except (asyncio.CancelledError, ConnectionError):
        status = 499  # nginx's status for a client that closed the connection; only in the log
        raise
    finally:
        sent = request.writer.output_size if n_bytes is None else n_bytes
        _log_access(request, status, sent, time.perf_counter() - started)


def _log_access(request: web.Request, status: int, n_bytes: int, seconds: float) -> None:
    fields = {
        "method": request.method,
        "path": request.rel_url.raw_path,  # percent-encoded, without the query: cannot break or flood the line
        "status": status,
        "seconds": round(seconds, 4),
        "bytes": n_bytes,
        "key": key.name if (key := request.get(KEY)) else None,
        "remote": request.remote,
    }
    who = f"{fields['remote']} key {fields['key']}" if fields["key"] else fields["remote"]
    message = "%s %s %d, %.3f s, %d bytes, %s"
    values = (request.method, fields["path"], status, seconds, n_bytes, who)
    is_quiet = request.path in _POLLED or (is_page(request.path) and status < 400)
    level = logging.DEBUG if is_quiet else logging.INFO
    access_log.log(level, message, *values, extra={"fields": fields})
