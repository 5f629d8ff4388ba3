"""Cuts a long text where llama.cpp tokenises both sides by themselves, so that parts give the same tokens as the whole.

llama.cpp splits a text at special tokens first, in a linked list that it walks from its head for every token that it
finds (`tokenizer_st_partition`): 20,000 tokens take 0.2 s, 120,000 take 4 s. In parts the time is linear, and somebody
may look between two of them whether the tokens are still wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_PART = 1024  # characters, at least; less than half of what `split_long_runs` cuts, so that it cuts no special token
_LONGEST_RUN = 4000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_LONGEST_RUN},}}|(?<!\s)\s{{{_LONGEST_RUN},}}")
"""Some BPE vocabularies split text with std::wregex, which recurses for each character and overflows the stack. Looked
for where a run begins, or a run of 3,999 would be looked at from each of its characters."""


class SpecialTokenSplitter:
    """Knows the special tokens of one vocabulary."""

    def __init__(self, special: Iterable[str], cuts: Iterable[str]) -> None:
        """`special`: the texts of all tokens that are looked for before anything else. `cuts`: those of them in front
        of which a text may be cut; not those that take along the white space to their left."""
        special = [text for text in special if text]
        self._longest = max(map(len, special), default=0)
        self._special = _any_of(special)
        self._cut = _any_of(text for text in cuts if text)

    def of(self, text: str) -> Iterator[str]:
        """The parts of a text, in order; a short text is one part."""
        start = 0
        while len(text) - start > 2 * _PART and (cut := self._next_cut(text, start + _PART)):
            yield text[start:cut]
            start = cut
        yield text[start:]

    def _next_cut(self, text: str, after: int) -> int | None:
        """Where the next special token begins that no other one reaches into."""
        while self._cut and (found := self._cut.search(text, after)):
            if not self._is_straddled(text, found.start()):
                return found.start()
            after = found.start() + 1
        return None

    def _is_straddled(self, text: str, cut: int) -> bool:
        """Whether a special token begins before the cut and ends behind it: it might be found first."""
        begins = range(max(0, cut - self._longest + 1), cut)
        found = (self._special.match(text, begin) for begin in begins) if self._special else ()
        return any(match and match.end() > cut for match in found)


def split_long_runs(text: str) -> Iterator[str]:
    """The parts of a text of which none has more than some 4,000 characters in a row without a space, or of spaces."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        for cut in range(run.start() + _LONGEST_RUN, run.end() + 1, _LONGEST_RUN):
            yield text[start:cut]
            start = cut
    if start < len(text) or not start:
        yield text[start:]


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the longest of these texts at a place. A tree of their letters, so that it looks at each letter once."""
    tree: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        branch = tree
        for letter in text:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return re.compile(_pattern(tree)) if tree else None


def _pattern(tree: dict[str, dict]) -> str:  # type: ignore[type-arg]
    """Not recursive by letter: tokens may be a thousand letters long."""
    letters = ""
    while len(tree) == 1 and "" not in tree:
        ((letter, tree),) = tree.items()
        letters += re.escape(letter)
    branches = [re.escape(letter) + _pattern(inner) for letter, inner in tree.items() if letter]
    if not branches:
        return letters
    return f"{letters}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
