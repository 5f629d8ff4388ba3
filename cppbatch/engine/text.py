"""From tokens to text: whole characters only, and no stop string."""

from __future__ import annotations

import codecs


class TextStream:
    """Assembles one completion's text from token pieces.

    `push` returns what can be shown now: incomplete UTF-8 characters and text that may turn out to be the beginning
    of a stop string are held back. After a stop string has come, `stopped` is True and the rest is dropped.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

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
        if not self._stop:
            return new
        text = self._held + new
        end = self._first_stop(text)
        if end is not None:
            self.stopped, self._held = True, ""
            return text[:end]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> int | None:
        """Where the text must be cut: before the stop string that is complete first, as if read letter by letter."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that could grow into a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
