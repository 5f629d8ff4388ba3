"""A radix tree over token ids: finds the holders (sequences, cached prefixes) that start with given tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Holder = TypeVar("Holder")


class _Node(Generic[Holder]):
    """An edge of the tree with the node at its end. `holders`: those whose tokens include the whole edge."""

    __slots__ = ("children", "edge", "holders")

    def __init__(self, edge: Tokens) -> None:
        self.edge = edge
        self.children: dict[int, _Node[Holder]] = {}
        self.holders: dict[Holder, None] = {}


class RadixTree(Generic[Holder]):
    """Maps token ids, int32[n], to holders, with one tree per salt."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[Holder]] = {}
        self._entries: dict[Holder, tuple[Hashable, Tokens]] = {}

    def insert(self, holder: Holder, tokens: Tokens, salt: Hashable) -> None:
        """Adds a holder of these tokens, or replaces its tokens. The array must not change afterwards."""
        self.discard(holder)
        self._entries[holder] = (salt, tokens)
        node = self._roots.setdefault(salt, _Node(tokens[:0]))
        node.holders[holder] = None
        at = 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = node.children[int(tokens[at])] = _Node(tokens[at:])
            same = n_common(child.edge, tokens[at:])
            if same < len(child.edge):
                child = self._split(node, child, same)
            node, at = child, at + same
            node.holders[holder] = None

    @staticmethod
    def _split(parent: _Node[Holder], node: _Node[Holder], at: int) -> _Node[Holder]:
        upper: _Node[Holder] = _Node(node.edge[:at])
        upper.holders = node.holders.copy()
        node.edge = node.edge[at:]
        upper.children[int(node.edge[0])] = node
        parent.children[int(upper.edge[0])] = upper
        return upper

    def discard(self, holder: Holder) -> None:
        """Removes a holder, if it is in the tree."""
        entry = self._entries.pop(holder, None)
        if entry is None:
            return
        salt, tokens = entry
        node, at = self._roots[salt], 0
        del node.holders[holder]
        if not node.holders:
            del self._roots[salt]
        while at < len(tokens):
            child = node.children[int(tokens[at])]
            del child.holders[holder]
            if not child.holders:
                del node.children[int(tokens[at])]
                break
            node, at = child, at + len(child.edge)
        self._merge_along(salt, tokens)

    def _merge_along(self, salt: Hashable, tokens: Tokens) -> None:
        """Merges edges at which holders no longer diverge. Otherwise the tree would grow with every request."""
        node, at = self._roots.get(salt), 0
        while node and at < len(tokens) and (child := node.children.get(int(tokens[at]))):
            at += len(child.edge)
            while len(child.children) == 1:
                (only,) = child.children.values()
                if len(only.holders) < len(child.holders):
                    break
                only.edge = self._part(next(iter(only.holders)), at - len(child.edge), at + len(only.edge))
                at += len(only.edge) - len(child.edge)
                child = node.children[int(only.edge[0])] = only
            node = child

    def _part(self, holder: Holder, start: int, stop: int) -> Tokens:
        return self._entries[holder][1][start:stop]

    def matches(self, tokens: Tokens, salt: Hashable) -> Iterator[tuple[Holder, int]]:
        """Every holder that shares a prefix with these tokens, with its length; longest first."""
        path = list(self._path(tokens, salt))
        deeper: dict[Holder, None] = {}
        for node, n in reversed(path):
            for holder in node.holders:
                if holder not in deeper:
                    yield holder, n
            deeper = node.holders

    def _path(self, tokens: Tokens, salt: Hashable) -> Iterator[tuple[_Node[Holder], int]]:
        """The nodes along these tokens, each with the number of matching tokens up to its end."""
        node, at = self._roots.get(salt), 0
        while node and at < len(tokens) and (child := node.children.get(int(tokens[at]))):
            same = n_common(child.edge, tokens[at:])
            at += same
            yield child, at
            node = child if same == len(child.edge) else None

    def covered_by(self, holder: Holder) -> list[Holder]:
        """The other holders whose tokens are a prefix of the tokens of `holder`."""
        salt, tokens = self._entries[holder]
        found = self.matches(tokens, salt)
        return [other for other, n in found if other is not holder and n == len(self._entries[other][1])]

    def covers(self, holder: Holder) -> list[Holder]:
        """The other holders whose tokens start with all tokens of `holder`."""
        salt, tokens = self._entries[holder]
        found = self.matches(tokens, salt)
        return [other for other, n in found if other is not holder and n == len(tokens)]


def n_common(a: Tokens, b: Tokens) -> int:
    """The length of the longest common prefix."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n
