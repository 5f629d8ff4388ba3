"""Which API family a path belongs to, as far as its errors go: those raised by middlewares have the path only."""

from __future__ import annotations

from cppbatch.server.anthropic.errors import anthropic_error
from cppbatch.server.fault import Fault

_OTHERS = {"/v1/messages": anthropic_error}
"""Families whose errors are not OpenAI's, by the path that theirs begin with."""


def error_body(path: str, fault: Fault) -> dict[str, object]:
    """The body of an error on this path."""
    for root, shape in _OTHERS.items():
        if path == root or path.startswith(f"{root}/"):
            return shape(fault)
    return openai_error(fault)


def openai_error(fault: Fault) -> dict[str, object]:
    """OpenAI's error object."""
    return {"error": {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}}
