"""Splits a long text into parts that tokenise to the same tokens as the whole text.

llama.cpp first splits a text at special tokens, in a linked list that it walks from the head for every token found
(`tokenizer_st_partition`): 20,000 tokens take 0.2 s, 120,000 take 4 s. In parts, the time is linear, and the caller can
stop between two parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_MIN_PART = 1024  # characters; less than half of _MAX_RUN, so that `split_long_runs` cuts no special token
_MAX_RUN = 4000  # characters
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN},}}|(?<!\s)\s{{{_MAX_RUN},}}")
"""A run of non-space, or of space, characters that is too long for some BPE vocabularies: llama.cpp splits their text
with std::wregex, which recurses for each character and overflows the stack. The lookbehind makes a match begin only
where a run begins; without it, a run of 3,999 characters would be scanned again from each of them."""


class SpecialTokenSplitter:
    """Splits texts in front of the special tokens of one vocabulary."""

    def __init__(self, special: Iterable[str], cuts: Iterable[str]) -> None:
        """`special`: the texts of all tokens that llama.cpp looks for first. `cuts`: those in front of which a text may
        be split, which excludes tokens that absorb white space on their left."""
        special = [text for text in special if text]
        self._longest = max(map(len, special), default=0)
        self._special = _any_of(special)
        self._cut = _any_of(text for text in cuts if text)

    def split(self, text: str) -> Iterator[str]:
        """The parts of a text, in order. A short text is one part."""
        start = 0
        while len(text) - start > 2 * _MIN_PART and (cut := self._next_cut(text, start + _MIN_PART)):
            yield text[start:cut]
            start = cut
        yield text[start:]

    def _next_cut(self, text: str, after: int) -> int | None:
        """The start of the next special token that no other one overlaps."""
        while self._cut and (found := self._cut.search(text, after)):
            if not self._is_inside_special(text, found.start()):
                return found.start()
            after = found.start() + 1
        return None

    def _is_inside_special(self, text: str, cut: int) -> bool:
        """Whether a special token begins before the cut and ends after it: llama.cpp might find that one first."""
        begins = range(max(0, cut - self._longest + 1), cut)
        found = (self._special.match(text, begin) for begin in begins) if self._special else ()
        return any(match and match.end() > cut for match in found)


def split_long_runs(text: str) -> Iterator[str]:
    """Splits a text so that no part contains a run of more than about 4,000 non-space, or space, characters."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        for cut in range(run.start() + _MAX_RUN, run.end() + 1, _MAX_RUN):
            yield text[start:cut]
            start = cut
    if start < len(text) or not start:
        yield text[start:]


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the longest of these texts: a trie of their characters, so that each one is scanned once."""
    tree: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        branch = tree
        for letter in text:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return re.compile(_pattern(tree)) if tree else None


def _pattern(tree: dict[str, dict]) -> str:  # type: ignore[type-arg]
    """Recurses for branches only, not for each character: tokens may be a thousand characters long."""
    letters = ""
    while len(tree) == 1 and "" not in tree:
        ((letter, tree),) = tree.items()
        letters += re.escape(letter)
    branches = [re.escape(letter) + _pattern(inner) for letter, inner in tree.items() if letter]
    if not branches:
        return letters
    return f"{letters}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
