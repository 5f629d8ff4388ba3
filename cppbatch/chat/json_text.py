"""Where a JSON value ends, in text that comes piece by piece."""

from __future__ import annotations

import json
import re
from typing import Any

_IN_STRING = re.compile(r'["\\]')
_BETWEEN = re.compile(r'["{}\[\]]|[^\s\w.,:+\-]')  # the last: what no JSON has outside of strings
_END_OF_SCALAR = re.compile(r"[^\w.+\-]")
_CLOSING = {"{": "}", "[": "]"}


class InvalidJson(ValueError):
    """`at`: the letter of the pushed text that cannot be."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class JsonValueScanner:
    """Looks for the end of one value, which begins with the first letter pushed.

    Brackets must match; that numbers, words and commas are where they should be is not checked.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = self._escaped = self._in_scalar = False

    def push(self, text: str) -> int | None:
        """Where in `text` the value has ended; None: it goes on. Raises `InvalidJson`."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._in_string:
                found = _IN_STRING.search(text, at)
                if found is None:
                    return None
                at = found.end()
                self._escaped, self._in_string = found[0] == "\\", found[0] == "\\"
            elif self._in_scalar:
                found = _END_OF_SCALAR.search(text, at)
                return found.start() if found else None
            else:
                found = _BETWEEN.search(text, at) if self._open else None
                if self._open and found is None:
                    return None
                at = self._structure(text, found.start() if found else at)
            if not (self._open or self._in_string or self._in_scalar):
                return at
        return None

    def _structure(self, text: str, at: int) -> int:
        """Takes one letter outside of strings."""
        letter = text[at]
        if letter == '"':
            self._in_string = True
        elif letter in _CLOSING:
            self._open.append(_CLOSING[letter])
        elif self._open and letter == self._open[-1]:
            self._open.pop()
        elif not self._open and re.match(r"[\w\-]", letter):
            self._in_scalar = True
        else:
            raise InvalidJson(at)
        return at + 1


def parse_json(text: str) -> Any:
    """The value of JSON text. Raises `ValueError`, also for what is nested too deeply, NaN and infinity."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def dump_json(value: Any) -> str:
    """A value as JSON text, as models write it."""
    return json.dumps(value, ensure_ascii=False)
