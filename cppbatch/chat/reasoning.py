"""How a model marks what it thinks before it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around a thought."""

    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        """What of the tags may be control tokens: a word behind a bracket is none."""
        end = max(self.opening.rfind(">"), self.opening.rfind("]")) + 1
        return self.opening[:end], self.closing

    @staticmethod
    def of(source: str) -> ReasoningTags | None:
        """Those that a template's text has; None: its model is not known to think."""
        return next((ReasoningTags(*tags) for tags in _TAGS if any(tag in source for tag in tags)), None)


class ReasoningState(Enum):
    """Where a prompt ends."""

    NONE = "none"
    """Before or in the answer, and the model is not known to think."""
    POSSIBLE = "possible"
    """Before the message: the model may begin with a thought."""
    OPEN = "open"
    """In a thought of which nothing is there yet."""
    BEGUN = "begun"
    """In the midst of a thought."""
    OVER = "over"
    """Behind a thought, or in the answer."""

    @staticmethod
    def of_prompt(prompt: str, thinking: ReasoningTags | None, prefill: str | None) -> ReasoningState:
        """`prefill`: what is there of the last message, with which the prompt ends; None: that begins only now.

        Tags anywhere else in the prompt are somebody's words.
        """
        if thinking is None:
            return ReasoningState.NONE
        if prefill is None:
            return _before_message(prompt, thinking)
        opened, closed = prefill.rfind(thinking.opening), prefill.rfind(thinking.closing)
        if opened > closed:
            return ReasoningState.BEGUN if prefill[opened + len(thinking.opening) :].strip() else ReasoningState.OPEN
        before = _before_message(prompt.removesuffix(prefill), thinking)
        if before is ReasoningState.OPEN and closed < 0:
            return ReasoningState.BEGUN if prefill.strip() else ReasoningState.OPEN
        return ReasoningState.OVER if prefill.strip() else before


def _before_message(prompt: str, thinking: ReasoningTags) -> ReasoningState:
    end = prompt.rstrip()
    if end.endswith(thinking.opening):
        return ReasoningState.OPEN
    return ReasoningState.OVER if end.endswith(thinking.closing) else ReasoningState.POSSIBLE
