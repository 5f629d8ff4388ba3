"""A limit for a model's reasoning: after so many tokens its closing marker is generated, and the answer follows.

Example: `<think>` and 64 tokens of reasoning; the 65th token is not the sampled one but `</think>`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cppbatch.errors import InvalidRequest

_EFFORT_TOKENS = {"none": 0, "minimal": 128, "low": 1024, "medium": 4096}  # higher ones have no limit
UNLIMITED = -1
"""No limit, as in llama-server."""
_MOST = 2**31 - 1


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens the reasoning of one completion may have, and how this family of models writes it."""

    n_tokens: int
    """Between the markers; 0: none."""
    start: str
    """The marker before the reasoning: `<think>`."""
    end: str
    """The marker behind it: `</think>`."""
    closing: str
    """What is generated when the budget is spent. It begins with `end`."""
    is_open: bool
    """Whether the prompt ends within the reasoning. Otherwise the model may begin with `start`."""
    several: bool = False
    """A completion may have several pieces of reasoning, at any place. They have one budget together."""


def effort_tokens(variables: dict[str, Any]) -> int | None:
    """The budget of the `reasoning_effort` among a template's variables; None: no limit."""
    effort = variables.get("reasoning_effort")
    return _EFFORT_TOKENS.get(effort) if isinstance(effort, str) else None


def given_budget(**fields: int | None) -> int | None:
    """The first of these fields of a request that is given, None if none is. Raises `InvalidRequest`."""
    field, wanted = next(((name, value) for name, value in fields.items() if value is not None), ("", None))
    if wanted is not None and (type(wanted) is not int or not UNLIMITED <= wanted <= _MOST):
        message = f"it must be the maximum number of reasoning tokens, 0 to {_MOST}, or {UNLIMITED} for no limit"
        raise InvalidRequest(field, f"is {wanted!r:.80}; {message}")
    return wanted
