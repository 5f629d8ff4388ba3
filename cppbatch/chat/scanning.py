"""Strings that mean something, found in text that comes piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterable


class MarkerFinder:
    """Finds the first of several strings, none of which is the beginning of another."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = tuple(markers)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))
        self._longest = max(map(len, self._markers), default=0)
        self._beginnings = frozenset(marker[:n] for marker in self._markers for n in range(1, len(marker)))

    def __bool__(self) -> bool:
        return bool(self._markers)

    def split(self, text: str) -> tuple[str, str | None, str]:
        """What stands before the first marker, that marker, and what comes after it.

        Without one: what is certainly none, None, and the end of the text that may be the beginning of one.
        """
        if not self._markers:
            return text, None, ""
        if found := self._pattern.search(text):
            return text[: found.start()], found[0], text[found.end() :]
        start = next(
            (i for i in range(max(0, len(text) - self._longest + 1), len(text)) if self._begins(text[i:])), None
        )
        return (text, None, "") if start is None else (text[:start], None, text[start:])

    def at_start(self, text: str) -> str | None:
        """The marker that the text begins with; "" if it may still become one."""
        if found := self._pattern.match(text) if self._markers else None:
            return found[0]
        return "" if self._begins(text) else None

    def _begins(self, text: str) -> bool:
        return text in self._beginnings
