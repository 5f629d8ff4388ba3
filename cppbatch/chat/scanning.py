"""Finding markers and the ends of JSON values in streamed text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]|[^\s\w.,:+\-]')  # the second: characters that JSON has only in strings
_END_OF_SCALAR = re.compile(r"[^\w.+\-]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSING = {"{": "}", "[": "]"}


class MarkerFinder:
    """Finds the first of several strings; of those that start at the same place, the longest."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(sorted(dict.fromkeys(markers), key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.markers)))
        self._longest = max(map(len, self.markers), default=0)
        self._prefixes = frozenset(marker[:n] for marker in self.markers for n in range(1, len(marker)))

    def __bool__(self) -> bool:
        return bool(self.markers)

    def split(self, text: str) -> tuple[str, str | None, str]:
        """Returns the text before the first marker, that marker, and the text after it.

        Without a marker: the text that cannot be part of one, None, and the end of the text if it may start a marker.
        """
        if not self.markers:
            return text, None, ""
        if found := self._pattern.search(text):
            if text[found.start() :] in self._prefixes:  # perhaps a longer one
                return text[: found.start()], None, text[found.start() :]
            return text[: found.start()], found[0], text[found.end() :]
        first = max(0, len(text) - self._longest + 1)
        start = next((i for i in range(first, len(text)) if text[i:] in self._prefixes), None)
        return (text, None, "") if start is None else (text[:start], None, text[start:])

    def at_start(self, text: str) -> str | None:
        """Returns the marker at the start of the text; "" if more text may complete one; else None."""
        if text in self._prefixes:
            return ""
        found = self._pattern.match(text) if self.markers else None
        return found[0] if found else None


class InvalidJson(ValueError):
    """`at`: index of the invalid character in the text that was pushed."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class JsonValueScanner:
    """Finds the end of a JSON value, which starts with the first character pushed.

    Brackets must match. The positions of numbers, words and commas are not checked.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = self._escaped = self._in_scalar = False

    def push(self, text: str) -> int | None:
        """Returns the index in `text` at which the value ends; None if it continues. Raises `InvalidJson`."""
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
                found = _OUTSIDE_STRINGS.search(text, at) if self._open else None
                if self._open and found is None:
                    return None
                at = self._read_structure(text, found.start() if found else at)
            if not (self._open or self._in_string or self._in_scalar):
                return at
        return None

    def _read_structure(self, text: str, at: int) -> int:
        """Reads one character outside strings. Returns the next index."""
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
        elif not self._open and re.match(r"[\w\-]", character):
            self._in_scalar = True
        else:
            raise InvalidJson(at)
        return at + 1


def parse_json(text: str) -> Any:
    """Decodes JSON text. Raises `ValueError`, also for NaN, infinity and values that are nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not valid JSON")


def dump_json(value: Any) -> str:
    """Encodes a value as JSON text with spaces after commas and colons, as models write it. Unpaired surrogates, which
    have no UTF-8 encoding, are escaped."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))
