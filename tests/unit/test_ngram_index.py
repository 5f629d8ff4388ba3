"""The index of n-grams finds every occurrence that it should, however tokens are added."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from cppbatch.engine.speculation.ngram_index import MOST_CANDIDATES, ORDERS, IndexedText, NgramIndex, hash_arrays

token_lists = st.lists(st.integers(0, 3), max_size=120) | st.lists(st.integers(0, 2**31 - 1), max_size=30)


def array(tokens: list[int]) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)


def one_by_one(index: NgramIndex, text: IndexedText, stop: int) -> None:
    hashes = text.hashes(text.n)
    for p in range(text.n, stop):
        index.append(text, hashes)
        hashes = text.roll(hashes, p)
    assert hashes == text.hashes(stop)


def at_once(index: NgramIndex, text: IndexedText, stop: int) -> None:
    index.extend(text, stop, hash_arrays(text.tokens, text.n, stop))


@given(st.lists(st.tuples(token_lists, st.lists(st.integers(0, 120), max_size=4), st.integers(0, 2)), max_size=4))
def test_tokens_added_in_pieces_of_any_size_are_indexed_as_one_by_one(
    texts: list[tuple[list[int], list[int], int]],
) -> None:
    single, mixed = NgramIndex(100), NgramIndex(100)
    for tokens, cuts, group in texts:
        ones, pieces = single.add(array(tokens), group), mixed.add(array(tokens), group)
        one_by_one(single, ones, len(tokens))
        for i, stop in enumerate(sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})):
            (at_once, one_by_one)[i % 2](mixed, pieces, stop)
        for order in range(len(ORDERS)):
            assert np.array_equal(single._head_arrays[order], mixed._head_arrays[order])
            assert np.array_equal(ones.chain_arrays[order], pieces.chain_arrays[order])


@given(st.lists(st.tuples(token_lists, st.integers(0, 1)), min_size=1, max_size=4))
def test_the_latest_occurrences_in_texts_of_the_group_are_found(texts: list[tuple[list[int], int]]) -> None:
    index = NgramIndex(1 << 14)
    added = [index.add(array(tokens), group) for tokens, group in texts]
    for text in added:
        at_once(index, text, len(text.tokens))
    last = added[-1]
    for i, order in enumerate(ORDERS):
        n = len(last.tokens)
        found = index.find(last, n, i, last.hashes(n))
        sought = last.tokens[n - order :].tolist()
        expected = [
            (text, p)
            for text in reversed(added)
            for p in range(text.n - 1, order - 1, -1)
            if text.group == last.group and n >= order and text.tokens[p - order : p].tolist() == sought
        ]
        assert found == expected[: len(found)]
        assert bool(found) == bool(expected)
        others = {text.group for text in added} - {last.group}
        assert len(found) == min(len(expected), MOST_CANDIDATES) or others


def test_a_removed_text_is_not_found() -> None:
    index = NgramIndex(100)
    first, second = (index.add(array([1, 2, 3, 4, 5])) for _ in range(2))
    at_once(index, first, 5)
    sought = array([1, 2, 3])
    at_once(index, second, 3)
    assert index.find(second, 3, 1, second.hashes(3)) == [(first, 3)]
    index.remove(first)
    assert index.find(second, 3, 1, second.hashes(3)) == []
    assert len(index) == 1
    assert sought.tolist() == second.tokens[:3].tolist()


def test_a_trimmed_text_keeps_exactly_its_indexed_ngrams() -> None:
    index = NgramIndex(100)
    text = index.add(array(list(range(10)) + [0] * 1000))
    at_once(index, text, 10)
    text.trim()
    assert text.tokens.tolist() == list(range(10))
    assert [len(chain) for chain in text.chain_arrays] == [10, 10]
    other = index.add(array([2, 3, 4]))
    at_once(index, other, 3)
    assert index.find(other, 3, 1, other.hashes(3)) == [(text, 5)]
