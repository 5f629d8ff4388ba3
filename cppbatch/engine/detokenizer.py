"""From tokens to text: whole characters only, and no stop string unless it is asked for."""

from __future__ import annotations

import codecs
from bisect import bisect_left


class Detokenizer:
    """Assembles one completion's text from token pieces.

    `push` returns what can be shown now: incomplete UTF-8 characters and text that may turn out to be the beginning
    of a stop string are held back. After a stop string has come, `stopped` is True and the rest is dropped. A letter
    costs nearly the same whether there is one stop string or a thousand (but for their different lengths).
    """

    def __init__(self, stop: tuple[str, ...] = (), *, include_stop: bool = False) -> None:
        self._stop = frozenset(stop)
        self._lengths = sorted({len(string) for string in stop}, reverse=True)
        self._sorted = sorted(stop)
        self._include_stop = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop: str | None = None
        """The stop string that has come."""
        self.n_characters = 0
        """Characters that were complete so far, whether shown, held back or dropped."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self.stop is not None

    def push(self, piece: bytes) -> str:
        """Adds a token's bytes and returns the text that is certain by now."""
        if self.stopped:
            return ""
        return self._release(self._decoder.decode(piece))

    def flush(self) -> str:
        """The text still held back, at the end of a completion; none after a stop string."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str) -> str:
        self.n_characters += len(new)
        if not self._stop or not new:
            return new
        text = self._held + new
        if found := self._first_stop(text, len(self._held)):
            end, self.stop = found
            self._held = ""
            return text[:end] if self._include_stop else text[: end - len(self.stop)]
        start = self._possible_start(text)
        self._held = text[start:]
        return text[:start]

    def _first_stop(self, text: str, n_old: int) -> tuple[int, str] | None:
        """Where the stop string ends that is complete first, as if read letter by letter, and which one it is.

        The first `n_old` letters have been looked at. Of two complete at the same letter the longer is meant.
        """
        for end in range(n_old + 1, len(text) + 1):
            for length in self._lengths:
                if length <= end and (string := text[end - length : end]) in self._stop:
                    return end, string
        return None

    def _possible_start(self, text: str) -> int:
        """Where the longest end of `text` begins that could grow into a stop string."""
        longest = self._lengths[0] - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if self._is_beginning(text[start:]):
                return start
        return len(text)

    def _is_beginning(self, text: str) -> bool:
        """Whether a stop string begins with this. Those that do stand together, the first one where it would stand."""
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)
