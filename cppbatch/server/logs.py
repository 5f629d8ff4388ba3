"""The server's log: one line a request, every line with the id of the request that it is about, as text or JSON."""

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

LogFormat = Literal["text", "json"]

access_log = logging.getLogger("cppbatch.access")

_HEADER = "X-Request-Id"
_ANTHROPICS_HEADER = "request-id"  # where Anthropic's clients look for it
_ID = web.RequestKey("request_id", str)
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CLIENT_GONE = 499  # nginx's number for it; nobody gets to see it as an answer
_current: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)


def set_up(log_format: LogFormat, *, verbose: bool) -> None:
    """Sends what is logged to stderr: requests, what becomes of batches, and warnings; when verbose, everything."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(_with_request_id)
    logging.basicConfig(handlers=[handler], level=logging.DEBUG if verbose else logging.WARNING, force=True)
    for told in (access_log, logging.getLogger("cppbatch.jobs")):
        told.setLevel(logging.INFO)
    logging.getLogger("aiohttp.server").addFilter(_in_one_line)


class TextFormatter(logging.Formatter):
    """`2026-03-01 12:03:41.512 WARNING cppbatch.server: what it says [request id]`."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        record.about = f" [{request_id}]" if request_id else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

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
        return json.dumps(line, default=str)  # in ASCII, so that no text can break a line


def _with_request_id(record: logging.LogRecord) -> bool:
    record.request_id = _current.get()
    return True


def _in_one_line(record: logging.LogRecord) -> bool:
    """Bytes that are no HTTP are the client's mistake: aiohttp would show where in its parser they were found out."""
    if record.exc_info and isinstance(error := record.exc_info[1], HttpProcessingError):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "refused a request that is no HTTP (%s)"
        record.args = (type(error).__name__,)  # not its message, which quotes the bytes: they may be part of a key
        record.exc_info = None
    return True


def request_id(request: web.Request) -> str:
    """The id of a request: what its client calls it, if that can be shown, else one of ours."""
    if _ID not in request:
        given = request.headers.get(_HEADER, "")
        request[_ID] = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
    return request[_ID]


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For `Application.on_response_prepare`: every response names its request."""
    response.headers[_HEADER] = response.headers[_ANTHROPICS_HEADER] = request_id(request)


@web.middleware
async def access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Logs each request when it has been answered, or its client is gone."""
    _current.set(request_id(request))  # aiohttp handles each request in a context of its own
    started = time.perf_counter()
    status, n_bytes = 500, None
    try:
        response = await handler(request)
        status = response.status
        n_bytes = response.content_length  # None for a stream
        return response
    except (asyncio.CancelledError, ConnectionError):
        status = _CLIENT_GONE
        raise
    finally:
        sent = request.writer.output_size if n_bytes is None else n_bytes
        _log_access(request, status, sent, time.perf_counter() - started)


def _log_access(request: web.Request, status: int, n_bytes: int, seconds: float) -> None:
    fields = {
        "method": request.method,
        "path": request.rel_url.raw_path,  # still quoted, and without the query: neither can break or fill the line
        "status": status,
        "seconds": round(seconds, 4),
        "bytes": n_bytes,
        "key": request.get(KEY),
        "remote": request.remote,
    }
    who = f"{fields['remote']} key {fields['key']}" if fields["key"] else fields["remote"]
    message = "%s %s %d, %.3f s, %d bytes, %s"
    values = (request.method, fields["path"], status, seconds, n_bytes, who)
    access_log.info(message, *values, extra={"fields": fields})
