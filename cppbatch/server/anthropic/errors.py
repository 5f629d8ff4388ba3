"""Errors as Anthropic's API shows them."""

from __future__ import annotations

from cppbatch.server.fault import Fault

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(fault: Fault) -> dict[str, object]:
    """Anthropic's error object: its type follows the status; the field at fault stands in the message."""
    other = "invalid_request_error" if fault.status < 500 else "api_error"
    return {"type": "error", "error": {"type": _KINDS.get(fault.status, other), "message": fault.message}}
