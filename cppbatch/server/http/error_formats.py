"""The format of an error in each API."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.errors import ContextOverflow


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


MODEL_NOT_FOUND, THREAD_UNSUPPORTED = "model_not_found", "thread_unsupported_request"
"""Codes of errors that have another form in one of the APIs."""


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
    is_unknown = error.code == MODEL_NOT_FOUND
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
    details = AnthropicErrorCode(error_code=THREAD_UNSUPPORTED) if error.code == THREAD_UNSUPPORTED else UNSET
    return AnthropicErrorResponse(error=AnthropicErrorDetail(type=kind, message=error.message, details=details))
