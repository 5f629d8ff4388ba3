"""A request's reasoning effort, as chat templates know it."""

from __future__ import annotations

from typing import Any

from cppbatch.errors import InvalidRequest

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def effort_variables(field: str, effort: str | None) -> dict[str, Any]:
    """A request's reasoning effort as variables for the chat template. `field`: the client's name for it.

    Raises `InvalidRequest` for an effort that no API has.
    """
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        other = "to pass the template any other value, use chat_template_kwargs"
        raise InvalidRequest(field, f"is {effort!r}; it must be one of {', '.join(_EFFORTS)} ({other})")
    disabled = {"enable_thinking": False} if effort == "none" else {}  # for templates that know no efforts
    return {"reasoning_effort": effort, **disabled}
