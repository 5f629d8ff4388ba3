"""A model's reasoning: its tags, the requested effort, and its budget."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.setting import INT32_MAX

_KNOWN_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


class ReasoningTags(msgspec.Struct, frozen=True):
    """Example: `<think>` and `</think>`."""

    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        """The parts of the tags that may be control tokens: up to the last bracket, without a word behind it."""
        bracket = max(self.start.rfind(">"), self.start.rfind("]")) + 1
        return tuple(filter(None, (self.start[:bracket], self.end)))

    @staticmethod
    def of_template(source: str) -> ReasoningTags | None:
        """Returns the tags that a chat template contains; None: the model is not known to reason."""
        return next((ReasoningTags(*tags) for tags in _KNOWN_TAGS if any(tag in source for tag in tags)), None)


class ReasoningState(Enum):
    """Where a prompt ends."""

    NONE = "none"
    """The model is not known to reason."""
    POSSIBLE = "possible"
    """Before the message: the model may start with reasoning."""
    STARTED = "started"
    """Directly after the start tag."""
    INSIDE = "inside"
    """Within the text of the reasoning."""
    ENDED = "ended"
    """After the end tag, or within the answer."""

    @staticmethod
    def of_prompt(prompt: str, tags: ReasoningTags | None, prefill: str | None) -> ReasoningState:
        """`prefill`: the text of the unfinished last message, which ends the prompt; None: a new message begins.

        Only tags at the end of the prompt or in the prefill count. Elsewhere they are text of a message.
        """
        if tags is None:
            return ReasoningState.NONE
        if prefill is None:
            return _before_message(prompt, tags)
        start, end = prefill.rfind(tags.start), prefill.rfind(tags.end)
        if start > end:
            inside = prefill[start + len(tags.start) :].strip()
            return ReasoningState.INSIDE if inside else ReasoningState.STARTED
        before = _before_message(prompt.removesuffix(prefill), tags)
        if before is ReasoningState.STARTED and end < 0:
            return ReasoningState.INSIDE if prefill.strip() else ReasoningState.STARTED
        return ReasoningState.ENDED if prefill.strip() else before


def _before_message(prompt: str, tags: ReasoningTags) -> ReasoningState:
    prompt = prompt.rstrip()
    if prompt.endswith(tags.start):
        return ReasoningState.STARTED
    return ReasoningState.ENDED if prompt.endswith(tags.end) else ReasoningState.POSSIBLE


# --- reasoning effort ------------------------------------------------------------------------------------------------
# A request's reasoning effort, as template variables.


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def effort_variables(field: str, effort: str | None) -> dict[str, Any]:
    """A request's reasoning effort as variables for the chat template. `field`: the client's name for it.

    Raises `InvalidRequest` for an unknown effort.
    """
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        other = "to pass the template any other value, use chat_template_kwargs"
        raise InvalidRequest(field, f"is {effort!r}; it must be one of {', '.join(_EFFORTS)} ({other})")
    disabled = {"enable_thinking": False} if effort == "none" else {}  # for templates that do not support efforts
    return {"reasoning_effort": effort, **disabled}


# --- thinking budget -------------------------------------------------------------------------------------------------
# A limit on a model's reasoning: after this number of tokens, its end marker is inserted, and the answer follows.
#
# Example: `<think>` and 64 tokens of reasoning; the 65th token is not the sampled one but `</think>`.


_EFFORT_TOKENS = {"none": 0, "minimal": 128, "low": 1024, "medium": 4096}  # higher ones have no limit
UNLIMITED = -1
"""No limit, as in llama-server."""


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum reasoning tokens of a completion, and this model family's reasoning format."""

    n_tokens: int
    """Between the markers; 0: none."""
    start: str
    """The marker before the reasoning: `<think>`."""
    end: str
    """The marker after it: `</think>`."""
    closing: str
    """The text inserted when the budget is used up: perhaps a message, then `end`, and what may follow it."""
    is_open: bool
    """Whether the prompt ends within the reasoning. Otherwise the model may start with `start`."""
    several: bool = False
    """Whether a completion may have several pieces of reasoning, anywhere, which share the budget."""

    def __post_init__(self) -> None:
        if not (self.start and self.end):
            raise InvalidRequest("reasoning_budget", "has an empty start or end; give the markers of the reasoning")


def effort_tokens(variables: dict[str, Any]) -> int | None:
    """The budget of the `reasoning_effort` among a template's variables; None: no limit."""
    effort = variables.get("reasoning_effort")
    return _EFFORT_TOKENS.get(effort) if isinstance(effort, str) else None


def check_budget(**fields: int | None) -> int | None:
    """The first given field among these; None if none is given. Raises `InvalidRequest`."""
    field, wanted = next(((name, value) for name, value in fields.items() if value is not None), ("", None))
    if wanted is not None and (type(wanted) is not int or not UNLIMITED <= wanted <= INT32_MAX):
        message = f"it must be the maximum number of reasoning tokens, 0 to {INT32_MAX}, or {UNLIMITED} for no limit"
        raise InvalidRequest(field, f"is {wanted!r:.80}; {message}")
    return wanted
