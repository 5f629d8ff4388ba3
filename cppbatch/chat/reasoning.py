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
class Thinking:
    """The tags around a thought."""

    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        """What of the tags may be control tokens: a word behind a bracket is none."""
        end = max(self.opening.rfind(">"), self.opening.rfind("]")) + 1
        return self.opening[:end], self.closing

    @staticmethod
    def of(source: str) -> Thinking | None:
        """Those that a template's text has; None: its model is not known to think."""
        return next((Thinking(*tags) for tags in _TAGS if any(tag in source for tag in tags)), None)


class Thought(Enum):
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
    def at_the_end(prompt: str, thinking: Thinking | None, prefill: str | None) -> Thought:
        """`prefill`: what is there of the last message, with which the prompt ends; None: that begins only now.

        Tags anywhere else in the prompt are somebody's words.
        """
        if thinking is None:
            return Thought.NONE
        if prefill is None:
            return _before_message(prompt, thinking)
        opened, closed = prefill.rfind(thinking.opening), prefill.rfind(thinking.closing)
        if opened > closed:
            return Thought.BEGUN if prefill[opened + len(thinking.opening) :].strip() else Thought.OPEN
        before = _before_message(prompt.removesuffix(prefill), thinking)
        if before is Thought.OPEN and closed < 0:
            return Thought.BEGUN if prefill.strip() else Thought.OPEN
        return Thought.OVER if prefill.strip() else before


def _before_message(prompt: str, thinking: Thinking) -> Thought:
    end = prompt.rstrip()
    if end.endswith(thinking.opening):
        return Thought.OPEN
    return Thought.OVER if end.endswith(thinking.closing) else Thought.POSSIBLE
