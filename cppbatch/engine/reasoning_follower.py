"""Follows the reasoning of a completion, and ends it when its budget is used up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from cppbatch.chat.reasoning import ThinkingBudget


class _Place(Enum):
    BEFORE = "before"  # the start of the completion, or with `several` any text outside the reasoning
    INSIDE = "inside"
    AFTER = "after"


class ReasoningFollower:
    """Follows the reasoning in the tokens of a completion, and determines when to close it."""

    def __init__(
        self,
        budget: ThinkingBudget,
        closing: Sequence[int],
        piece: Callable[[int], bytes],
        *,
        has_grammar: bool = False,
    ) -> None:
        """`closing`: the tokens of `budget.closing`. `piece`: returns the bytes of a token, including control tokens.
        `has_grammar`: the text must match one, so the reasoning is only closed between characters."""
        self._budget = budget
        self._has_grammar = has_grammar
        self._closing = list(closing)
        self._piece = piece
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._place = _Place.INSIDE if budget.is_open else _Place.BEFORE
        self._unread = b""  # the end of the text, which may be the start of a marker
        self._n_inside = 0
        self.n_followed = 0
        """The number of processed tokens of the completion."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Processes the next tokens of the completion."""
        self.n_followed += len(tokens)
        for token in tokens:
            if self._place is _Place.AFTER:
                return
            self._unread += self._piece(token)
            if self._place is _Place.INSIDE:
                self._n_inside += 1
                self._find_end()
            else:
                self._find_start()

    def closing(self, n_room: int) -> list[int]:
        """The tokens to insert once the budget is used up; [] before that, or if they exceed `n_room`.

        If the model is already writing the end marker, it may finish it.
        """
        is_spent = self._place is _Place.INSIDE and self._n_inside >= self._budget.n_tokens
        if is_spent and self._has_grammar and self._is_within_character():
            return []
        return self._closing if is_spent and len(self._closing) <= n_room and not self._is_ending() else []

    def _find_start(self) -> None:
        if self._budget.several:
            _, found, behind = self._unread.rpartition(self._start)
            self._unread = behind if found else self._unread[-len(self._start) :]
        else:
            text = self._unread.lstrip()
            found = text[: len(self._start)] if text.startswith(self._start) else b""
            if not found and not self._start.startswith(text):
                self._place = _Place.AFTER
            behind = text[len(self._start) :]
        if found:
            self._place, self._unread = _Place.INSIDE, behind
            self._find_end()

    def _find_end(self) -> None:
        _, found, behind = self._unread.partition(self._end)
        if found:
            self._place = _Place.BEFORE if self._budget.several else _Place.AFTER
            self._unread = behind
        else:
            self._unread = self._unread[-len(self._end) :]

    def _is_ending(self) -> bool:
        """Whether the text ends with at least two characters of the end marker."""
        return any(self._unread.endswith(self._end[:n]) for n in range(2, len(self._end)))

    def _is_within_character(self) -> bool:
        """Whether the text ends with an incomplete UTF-8 character."""
        for n, byte in enumerate(reversed(self._unread[-3:]), start=1):
            if byte & 0xC0 != 0x80:  # the first byte of a character, which gives its length
                return n < (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1)
        return False
