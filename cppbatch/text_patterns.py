"""Regular expressions for one of many texts, such as the thousand special tokens of a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the longest of these texts: a trie of their characters, so that each one is scanned once. None
    without texts; empty ones are ignored."""
    tree: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in filter(None, texts):
        branch = tree
        for letter in text:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return re.compile(_pattern(tree)) if tree else None


def _pattern(tree: dict[str, dict]) -> str:  # type: ignore[type-arg]
    """Recurses only for branches, not for each character: tokens may be a thousand characters long."""
    letters = ""
    while len(tree) == 1 and "" not in tree:
        ((letter, tree),) = tree.items()
        letters += re.escape(letter)
    branches = [re.escape(letter) + _pattern(inner) for letter, inner in tree.items() if letter]
    if not branches:
        return letters
    return f"{letters}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
