"""The tags around a model's reasoning, and whether a prompt ends inside them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_KNOWN_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


@dataclass(frozen=True, slots=True)
class ReasoningTags:
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
