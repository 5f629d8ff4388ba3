"""From exceptions to error answers."""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from cppbatch.errors import (
    Conflict,
    CppBatchError,
    EngineClosed,
    GenerationFailed,
    InvalidRequest,
    NotFound,
    QueueFull,
    StorageError,
)  # fmt: skip
from cppbatch.server.families import error_body
from cppbatch.server.fault import Fault

log = logging.getLogger("cppbatch.server")


class TooManyRequests(CppBatchError):
    """As many requests are being answered as may be at once."""


class NoStorage(CppBatchError):
    """This server keeps no files."""


class ModelNotFound(InvalidRequest):
    """There is no such model here: a 404, as OpenAI has it."""

    def __init__(self, message: str) -> None:
        super().__init__("model", message)


_EXPECTED: dict[type[CppBatchError], tuple[int, str, str]] = {
    QueueFull: (429, "rate_limit_error", "queue_full"),
    TooManyRequests: (429, "rate_limit_error", "too_many_requests"),
    EngineClosed: (503, "server_error", "unavailable"),
    NoStorage: (503, "server_error", "no_storage"),
    GenerationFailed: (500, "server_error", "generation_failed"),
}
"""With their status, type and code."""
_INVALID: dict[type[InvalidRequest], tuple[int, str]] = {
    ModelNotFound: (404, "model_not_found"),
    NotFound: (404, "not_found"),
    Conflict: (409, "conflict"),
}
"""With their status and code; others are a 400. They name the field at fault."""


def fault_of(error: BaseException) -> Fault:
    """What an exception tells the client; logs what nobody expected."""
    if isinstance(error, InvalidRequest):
        status, code = _INVALID.get(type(error), (400, None))
        return Fault(status, str(error), "invalid_request_error", error.field, code)
    if isinstance(error, StorageError):  # its message names the server's files
        log.error("%s", error)
        return Fault(507, error.public, "server_error", code="storage")
    for expected, (status, kind, code) in _EXPECTED.items():
        if isinstance(error, expected):
            return Fault(status, str(error), kind, code=code)
    if isinstance(error, web.HTTPException):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return Fault(error.status, error.text or error.reason, kind)
    log.error("a request failed", exc_info=error)
    return Fault(500, f"internal error ({type(error).__name__}); the server's log has the details", "server_error")


def json_response(body: object, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def error_response(request: web.Request, fault: Fault) -> web.Response:
    """An error in the shape of the API family that the request's path belongs to."""
    return json_response(error_body(request.path, fault), fault.status)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns any exception of a handler into an error response."""
    try:
        return await handler(request)
    except ConnectionResetError:  # the client is gone: there is nobody to tell
        raise
    except Exception as error:
        if request.match_info.http_exception is error:  # no route, or none for this method
            error.text = f"there is no {request.method} {request.path} here"
        response = error_response(request, fault_of(error))
        if response.status == 503:
            response.headers["Retry-After"] = "5"
        if isinstance(error, QueueFull):
            response.headers["Retry-After"] = f"{error.retry_after:.0f}"
        if isinstance(error, TooManyRequests):
            response.headers["Retry-After"] = "1"
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            response.force_close()  # the rest of it is not waited for
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response
