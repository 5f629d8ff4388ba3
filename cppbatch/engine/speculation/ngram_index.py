"""An index of n-grams in texts, and the acceptance probability of a match's continuation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Hashes = tuple[int, int]
"""The hashes of a text's last tokens, one per order in `ORDERS`."""

ORDERS = (8, 3)
"""Lengths of the indexed n-grams. A search for 8 finds the longest matches, one for 3 the others."""
MOST_CANDIDATES = 8
"""Number of (most recent) occurrences that a search considers."""

_BASE = 0x9E3779B97F4A7C15  # odd
_MIX = 0xD6E8FEB86659FD93  # odd: moves all bits of a hash into its high bits
_MASK = (1 << 64) - 1
_OUT_LONG, _OUT_SHORT = (pow(_BASE, order, 1 << 64) for order in ORDERS)
_POSITION = (1 << 32) - 1


class IndexedText:
    """A text in an index: `tokens[:n]`, int32, to which tokens may still be appended.

    For every position `p`, the index has the preceding n-gram, so `tokens[p]` is a continuation of it. Texts of
    different `group`s never match each other.
    """

    __slots__ = ("base", "chain_arrays", "chains", "doubts", "group", "n", "raw", "seed", "tokens", "view")

    def __init__(self, tokens: npt.NDArray[np.int32], number: int, group: int) -> None:
        self.base = number << 32
        self.group = group
        self.seed = group * _BASE & _MASK
        self.n = 0
        self.doubts = bytearray(len(tokens))  # of each token, see `SuffixProposer`
        # For each order and position: the previous occurrence of the same n-gram. Memory is only used once touched.
        self._set(tokens, [np.zeros(len(tokens), np.int64) for _ in ORDERS])

    def _set(self, tokens: npt.NDArray[np.int32], chains: list[npt.NDArray[np.int64]]) -> None:
        self.tokens, self.chain_arrays = tokens, chains
        self.view = tokens.data  # its items are Python integers, which is faster than numpy's
        self.raw = self.view.cast("B")
        self.chains = [chain.data for chain in chains]

    def trim(self) -> None:
        """Copies the known part of the text, which is final, so that its original array can be freed."""
        self._set(self.tokens[: self.n].copy(), [chain[: self.n].copy() for chain in self.chain_arrays])
        self.doubts = self.doubts[: self.n]

    def hashes(self, n: int) -> Hashes:
        """The hashes of the tokens before position `n`."""
        long = short = 0
        for token in self.view[max(0, n - ORDERS[0]) : n]:
            long = long * _BASE + token + 1
        for token in self.view[max(0, n - ORDERS[1]) : n]:
            short = short * _BASE + token + 1
        return long & _MASK, short & _MASK

    def roll(self, hashes: Hashes, n: int) -> Hashes:
        """The hashes before position `n + 1`, from those before position `n`."""
        view, (long, short) = self.view, hashes
        token = view[n] + 1
        long = long * _BASE + token
        short = short * _BASE + token
        if n >= ORDERS[0]:
            long -= (view[n - ORDERS[0]] + 1) * _OUT_LONG
        if n >= ORDERS[1]:
            short -= (view[n - ORDERS[1]] + 1) * _OUT_SHORT
        return long & _MASK, short & _MASK


def hash_arrays(tokens: npt.NDArray[np.int32], start: int, stop: int) -> list[npt.NDArray[np.uint64]]:
    """For each order, the hashes before positions `max(start, order)` to `stop - 1`."""
    values = tokens[:stop].astype(np.uint64) + np.uint64(1)
    arrays = []
    for order in ORDERS:
        first = max(start, order)
        n = max(0, stop - first)
        hashes = np.zeros(n, np.uint64)
        for i in range(first - order, first):
            hashes *= np.uint64(_BASE)
            hashes += values[i : i + n]
        arrays.append(hashes)
    return arrays


class NgramIndex:
    """Finds earlier occurrences of a text's last tokens.

    For each n-gram order, `heads[slot]` is the latest occurrence of an n-gram whose hash has this slot, and the texts'
    chains lead from each occurrence to the previous one. Each is compared with the tokens searched for.
    `size`: its capacity in tokens; beyond it, older occurrences are found less often.
    """

    def __init__(self, size: int) -> None:
        bits = max(6, (2 * size - 1).bit_length())
        self._shift = 64 - bits
        self._head_arrays = [np.zeros(1 << bits, np.int64) for _ in ORDERS]
        self._heads = [heads.data for heads in self._head_arrays]
        self._texts: dict[int, IndexedText] = {}
        self._last_number = 0

    def __len__(self) -> int:
        """The number of texts."""
        return len(self._texts)

    def add(self, tokens: npt.NDArray[np.int32], group: int = 0) -> IndexedText:
        """A new text, empty so far. `append` and `extend` index the content of `tokens`."""
        self._last_number += 1
        text = self._texts[self._last_number] = IndexedText(tokens, self._last_number, group)
        return text

    def remove(self, text: IndexedText) -> None:
        """Removes the text from searches."""
        del self._texts[text.base >> 32]

    def append(self, text: IndexedText, hashes: Hashes) -> None:
        """Indexes the next token of the text; `hashes`: of those before it."""
        p = text.n
        text.n = p + 1
        ref, seed, shift = text.base | p, text.seed, self._shift
        if p >= ORDERS[1]:
            slot = ((hashes[1] ^ seed) * _MIX & _MASK) >> shift
            heads = self._heads[1]
            text.chains[1][p] = heads[slot]
            heads[slot] = ref
            if p >= ORDERS[0]:
                slot = ((hashes[0] ^ seed) * _MIX & _MASK) >> shift
                heads = self._heads[0]
                text.chains[0][p] = heads[slot]
                heads[slot] = ref

    def extend(self, text: IndexedText, stop: int, arrays: list[npt.NDArray[np.uint64]]) -> None:
        """Indexes the tokens up to `stop`; `arrays`: `hash_arrays` from `text.n` to `stop`. Equivalent to `append`."""
        for i, order in enumerate(ORDERS):
            n = len(arrays[i])
            if not n:
                continue
            slots = (((arrays[i] ^ np.uint64(text.seed)) * np.uint64(_MIX)) >> np.uint64(self._shift)).astype(np.int64)
            width = n.bit_length()
            packed = np.sort((slots << width) | np.arange(n))  # by slot, then by position
            slots, where = packed >> width, packed & ((1 << width) - 1)
            refs = where + (text.base + max(text.n, order))
            is_first = np.ones(n + 1, bool)  # of those with its slot; the last entry makes the last one visible below
            np.not_equal(slots[1:], slots[:-1], out=is_first[1:-1])
            heads, chain = self._head_arrays[i], np.empty(n, np.int64)
            chain[1:] = refs[:-1]
            firsts = slots[is_first[:-1]]
            chain[is_first[:-1]] = heads[firsts]
            heads[firsts] = refs[is_first[1:]]
            text.chain_arrays[i][where + max(text.n, order)] = chain
        text.n = stop

    def skip(self, text: IndexedText, stop: int) -> None:
        """Adds the tokens up to `stop` without indexing them in this text."""
        text.n = stop

    def find(self, text: IndexedText, n: int, order: int, hashes: Hashes) -> list[tuple[IndexedText, int]]:
        """Occurrences of the `ORDERS[order]` tokens before position `n` of `text`, with these hashes: texts with the
        positions after them, at most `MOST_CANDIDATES`, latest first."""
        size = 4 * ORDERS[order]
        if 4 * n < size:
            return []
        ref = self._heads[order][((hashes[order] ^ text.seed) * _MIX & _MASK) >> self._shift]
        if not ref:
            return []
        found, texts, group = [], self._texts, text.group
        sought = bytes(text.raw[4 * n - size : 4 * n])
        for _ in range(MOST_CANDIDATES):
            other = texts.get(ref >> 32)
            if other is None:
                break
            p = ref & _POSITION
            if other.group == group and other.raw[4 * p - size : 4 * p] == sought:
                found.append((other, p))
            ref = other.chains[order][p]
            if not ref:
                break
        return found
