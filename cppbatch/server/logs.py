"""The server's log, as text or JSON: one line per request; every line names the request it belongs to."""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import json
import logging
import re
import sys
import time
import uuid
from typing import Any, Literal

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from cppbatch.server.keys import KEY
from cppbatch.server.web_page import is_page

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

access_log = logging.getLogger("cppbatch.access")

_HEADER = "X-Request-Id"
_ANTHROPIC_HEADER = "request-id"  # Anthropic's clients read this one
_ID = web.RequestKey("request_id", str)
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_POLLED = frozenset({"/health", "/v1/health", "/ready"})  # by load balancers, every few seconds
_CLIENT_CLOSED = 499  # nginx's status for requests whose client closed the connection; only in the log
_current: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)


def set_up(log_format: LogFormat, *, verbose: bool = False, level: LogLevel | None = None, access: bool = True) -> None:
    """Logs requests, the progress of batches, workers and replicas that come and go, and warnings to stderr; with
    `verbose`, everything.

    `level`: of all lines, instead. `access`: whether requests are logged.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(_with_request_id)
    general = "debug" if verbose else level or "warning"
    logging.basicConfig(handlers=[handler], level=general.upper(), force=True)
    shown = ("cppbatch.jobs", "cppbatch.flags", "cppbatch.scaling", "cppbatch.models", "cppbatch.ray")
    for logger in (access_log, *map(logging.getLogger, shown)):
        logger.setLevel("INFO" if level is None and not verbose else logging.NOTSET)
    access_log.disabled = not access
    logging.getLogger("aiohttp.server").addFilter(_shorten_http_errors)


class TextFormatter(logging.Formatter):
    """`2026-03-01 12:03:41.512 WARNING cppbatch.server: message [request id]`."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        record.about = f" [{request_id}]" if request_id else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII, so no text can contain a line break


def _with_request_id(record: logging.LogRecord) -> bool:
    record.request_id = _current.get()
    return True


def _shorten_http_errors(record: logging.LogRecord) -> bool:
    """Reduces aiohttp's tracebacks about malformed HTTP, which is the client's error, to a one-line warning."""
    if record.exc_info and isinstance(error := record.exc_info[1], HttpProcessingError):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "refused a request that is no HTTP (%s)"
        record.args = (type(error).__name__,)  # not its message, which quotes bytes that may be part of a key
        record.exc_info = None
    return True


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
    """Logs each request when it has been answered, or its client has closed the connection."""
    _current.set(request_id(request))  # aiohttp handles each request in its own context
    started = time.perf_counter()
    status, n_bytes = 500, None
    try:
        response = await handler(request)
        status = response.status
        n_bytes = response.content_length  # None for a stream
        return response
    except (asyncio.CancelledError, ConnectionError):
        status = _CLIENT_CLOSED
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
