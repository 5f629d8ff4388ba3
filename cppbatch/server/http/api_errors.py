"""Converts exceptions to error responses, in the format of the API of the request's path."""

from __future__ import annotations

import asyncio
import logging
from difflib import get_close_matches
from math import ceil

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from cppbatch.errors import (
    Conflict,
    ContextOverflow,
    CppBatchError,
    EngineClosed,
    Forbidden,
    GenerationFailed,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotLoaded,
    NotFound,
    QueueFull,
    StorageError,
    shorten,
)
from cppbatch.server.http.error_formats import (
    MODEL_NOT_FOUND,
    THREAD_UNSUPPORTED,
    AnthropicErrorResponse,
    ApiError,
    anthropic_error,
    error_body,
    is_anthropic,
)
from cppbatch.server.http.event_stream import STARTED, ServerSentEvent

log = logging.getLogger("cppbatch.server")


class TooManyRequests(CppBatchError):
    """A limit on requests is reached. `retry_after`: seconds until another request is allowed."""

    def __init__(self, message: str, retry_after: float = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(TooManyRequests):
    """The rate limit of the request's key is reached."""


class NoStorage(CppBatchError):
    """This server does not store files."""


class SwitchedOff(CppBatchError):
    """The route is disabled on this server."""


class ModelNotFound(InvalidRequest):
    """The requested model is not loaded: status 404, as in OpenAI's API."""

    def __init__(self, message: str) -> None:
        super().__init__("model", message)


class LoadTimeout(CppBatchError):
    """The request's timeout expired before its model was loaded."""


class ThreadUnsupported(InvalidRequest):
    """A request for a stored conversation, as on Anthropic's server. Anthropic's client then sends the whole
    conversation instead."""

    def __init__(self) -> None:
        super().__init__(
            "thread",
            "is not supported: this server does not store conversations; send the whole conversation without it",
        )


_EXPECTED: dict[type[CppBatchError], tuple[int, str, str]] = {
    QueueFull: (429, "rate_limit_error", "queue_full"),
    RateLimited: (429, "rate_limit_error", "rate_limit_exceeded"),
    TooManyRequests: (429, "rate_limit_error", "too_many_requests"),
    EngineClosed: (503, "server_error", "unavailable"),
    ModelLoadFailed: (503, "server_error", "model_load_failed"),
    LoadTimeout: (503, "server_error", "loading"),
    ModelNotLoaded: (400, "invalid_request_error", "model_not_loaded"),  # status as in llama-server
    NoStorage: (503, "server_error", "no_storage"),
    SwitchedOff: (501, "not_supported_error", "switched_off"),  # status and type as in llama-server
    GenerationFailed: (500, "server_error", "generation_failed"),
}
"""Status, type and code of each exception."""
_INVALID: dict[type[InvalidRequest], tuple[int, str]] = {
    ModelNotFound: (404, MODEL_NOT_FOUND),
    NotFound: (404, "not_found"),
    Forbidden: (403, "not_allowed_for_key"),
    Conflict: (409, "conflict"),
    ThreadUnsupported: (400, THREAD_UNSUPPORTED),
}
"""Status and code of each kind of invalid request; all others have status 400 and no code."""
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
"""Code for each status of aiohttp's exceptions."""
_OVERFLOW = "exceed_context_size_error"
"""llama-server's type for a prompt longer than the context. The code is OpenAI's."""


def api_error(error: BaseException) -> ApiError:
    """The error sent to the client for an exception. Logs unexpected exceptions."""
    if isinstance(error, InvalidRequest):
        if error.overflow:
            message = _overflow_message(error.field, error.overflow)
            return ApiError(400, message, _OVERFLOW, error.field, "context_length_exceeded", error.overflow)
        status, code = _INVALID.get(type(error), (400, None))
        kind = "permission_error" if status == 403 else "invalid_request_error"
        return ApiError(status, str(error), kind, error.field, code)
    if isinstance(error, StorageError):  # its message contains file names of the server
        log.error("%s", error)
        return ApiError(507, error.public, "server_error", code="storage")
    for expected, (status, kind, code) in _EXPECTED.items():
        if isinstance(error, expected):
            return ApiError(status, str(error), kind, code=code)
    if isinstance(error, web.HTTPException):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return ApiError(error.status, error.text or error.reason, kind, code=_HTTP_CODES.get(error.status))
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}); see the server log for details", "server_error")


def _overflow_message(field: str, overflow: ContextOverflow) -> str:
    """In the words of OpenAI and llama-server: clients that shorten conversations recognise either."""
    n, or_more = overflow.n_prompt_tokens, " or more" if overflow.is_least else ""
    advice = f", or {overflow.advice} on the server" if overflow.advice else ""
    excess = "is too large to process" if overflow.is_pooled else "exceeds the available context size"
    return (
        f"This model's maximum context length is {overflow.n_ctx} tokens. However, your {field} resulted in {n} tokens"
        f"{or_more}, which {excess}. Please reduce the length of the {field}{advice}."
    )


def json_response(body: object, status: int = 200) -> web.Response:
    """A response with this body as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def error_response(request: web.Request, error: ApiError) -> web.Response:
    """An error response, in the format of the client's API."""
    message = shorten(error.message)  # that of an exception of aiohttp may have the whole path
    message = message.encode(errors="backslashreplace").decode()  # surrogates: bytes of headers, not in UTF-8
    error = error._replace(message=message)
    body = anthropic_error(error) if is_anthropic(request) else error_body(request.path, error)
    return json_response(body, error.status)


def _error_event(request: web.Request, error: ApiError) -> ServerSentEvent:
    """The only event of a stream that was started before its request failed."""
    body = error_body(request.path, error)
    return ServerSentEvent(body, "error" if isinstance(body, AnthropicErrorResponse) else None)


def _remedy(request: web.Request, error: Exception) -> str:
    """The remedy for a path without a route, or without one for this method."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"use {' or '.join(sorted(error.allowed_methods))}"
    paths = {resource.canonical for resource in request.app.router.resources()}
    # only a short path is compared with existing ones
    if len(request.path) < 100 and (near := get_close_matches(request.path, sorted(paths), 1, 0.7)):
        return f"did you mean {near[0]}?"
    return "see /openapi.json for the available paths"


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception of a handler into an error response."""
    try:
        return await handler(request)
    except ConnectionResetError:  # the client is gone, which will cancel this task: aiohttp logs other exceptions
        raise asyncio.CancelledError from None
    except Exception as error:
        if request.match_info.http_exception is error:  # no route, or none for this method
            error.text = f"{request.method} {request.path} not found; {_remedy(request, error)}"
        started: web.StreamResponse | None = request.get(STARTED)
        if started:
            await started.write(_error_event(request, api_error(error)).encode())
            return started
        response = error_response(request, api_error(error))
        if response.status == 503:
            response.headers["Retry-After"] = "5"
        if isinstance(error, (QueueFull, ModelLoadFailed)):
            response.headers["Retry-After"] = f"{ceil(error.retry_after)}"
        if isinstance(error, TooManyRequests):
            response.headers["Retry-After"] = f"{ceil(error.retry_after)}"
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            response.force_close()  # the rest of the body is not read
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response
