"""Converts exceptions to error responses, in the format of the API of the request's path."""

from __future__ import annotations

import asyncio
import logging
from difflib import get_close_matches
from math import ceil
from typing import Literal, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import UNSET, UnsetType

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
from cppbatch.server.http.event_stream import STARTED, ServerSentEvent

log = logging.getLogger("cppbatch.server")


class ApiError(NamedTuple):
    """An error for the client, independent of the API's error format."""

    status: int
    """The HTTP status."""
    message: str
    type: str
    """OpenAI's name: `invalid_request_error`, `authentication_error`, `permission_error`, `rate_limit_error` or
    `server_error`."""
    param: str | None = None
    """The request field that caused the error."""
    code: str | None = None
    overflow: ContextOverflow | None = None
    """Set if the prompt is longer than the context, for which each API has its own message."""


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
_THREAD_UNSUPPORTED = "thread_unsupported_request"
_INVALID: dict[type[InvalidRequest], tuple[int, str]] = {
    ModelNotFound: (404, "model_not_found"),
    NotFound: (404, "not_found"),
    Forbidden: (403, "not_allowed_for_key"),
    Conflict: (409, "conflict"),
    ThreadUnsupported: (400, _THREAD_UNSUPPORTED),
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


# --- the error format of each API -----------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """An error in OpenAI's format."""

    message: str
    type: str
    """`invalid_request_error`, `authentication_error`, `permission_error`, `rate_limit_error` or `server_error`; as in
    llama-server, `not_supported_error` for a disabled feature, and `exceed_context_size_error` for a prompt longer than
    the context, with OpenAI's code `context_length_exceeded`."""
    param: str | None
    """The request field that caused the error."""
    code: str | None
    n_prompt_tokens: int | UnsetType = UNSET
    """If the prompt exceeds the context: its tokens, or a lower bound if it is too long to tokenise."""
    n_ctx: int | UnsetType = UNSET
    """If the prompt exceeds the context: the maximum tokens of prompt and completion together."""


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error response, in OpenAI's format."""

    error: ErrorDetail


class AnthropicErrorCode(msgspec.Struct, frozen=True, kw_only=True):
    """`error.details`: an error code that Anthropic's client recognises."""

    error_code: str


class AnthropicErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """An error in Anthropic's format. The message names the field that caused it."""

    type: str
    """Determined by the HTTP status."""
    message: str
    n_prompt_tokens: int | UnsetType = UNSET
    """The tokens of a prompt that exceeds the context, or a lower bound."""
    n_ctx: int | UnsetType = UNSET
    """The maximum tokens of prompt and completion, for such a prompt."""
    details: AnthropicErrorCode | UnsetType = UNSET
    """`thread_unsupported_request`, if the request has a `thread`."""


class AnthropicErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error response, in Anthropic's format."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


class OllamaErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error response, in Ollama's format, and the last line of a stream that failed."""

    error: str
    """The message; it names the field that caused the error."""


_OLLAMA_PATHS = "/api/"
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_VERSION = "anthropic-version"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(request: web.Request) -> bool:
    """Whether a client of Anthropic's API sent the request; on paths that two APIs share, its header decides."""
    return _ANTHROPIC_VERSION in request.headers or _is_anthropic_path(request.path)


def _is_anthropic_path(path: str) -> bool:
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def error_body(path: str, error: ApiError) -> ErrorResponse | AnthropicErrorResponse | OllamaErrorResponse:
    """The body of an error response, in the format of the path's API."""
    if path.startswith(_OLLAMA_PATHS):
        return ollama_error(error)
    if _is_anthropic_path(path):
        return anthropic_error(error)
    return openai_error(error)


def ollama_error(error: ApiError) -> OllamaErrorResponse:
    """Ollama's error object. An unknown model is reported in Ollama's words: model 'x' not found."""
    is_unknown = error.code == _INVALID[ModelNotFound][1]
    return OllamaErrorResponse(error=error.message.replace("model: ", "model ", 1) if is_unknown else error.message)


def openai_error(error: ApiError) -> ErrorResponse:
    """OpenAI's error object."""
    return ErrorResponse(
        error=ErrorDetail(
            message=error.message,
            type=error.type,
            param=error.param,
            code=error.code,
            n_prompt_tokens=error.overflow.n_prompt_tokens if error.overflow else UNSET,
            n_ctx=error.overflow.n_ctx if error.overflow else UNSET,
        )
    )


def anthropic_error(error: ApiError) -> AnthropicErrorResponse:
    """Anthropic's error object."""
    if overflow := error.overflow:
        n, most = overflow.n_prompt_tokens, min(overflow.n_ctx, overflow.n_prompt_tokens - 1)  # an answer needs one
        message = f"prompt is too long: {n} tokens > {most} maximum"
        detail = AnthropicErrorDetail(
            type="invalid_request_error", message=message, n_prompt_tokens=n, n_ctx=overflow.n_ctx
        )
        return AnthropicErrorResponse(error=detail)
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, default)
    details = AnthropicErrorCode(error_code=_THREAD_UNSUPPORTED) if error.code == _THREAD_UNSUPPORTED else UNSET
    return AnthropicErrorResponse(error=AnthropicErrorDetail(type=kind, message=error.message, details=details))


# --- responses ------------------------------------------------------------------------------------------------------


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
