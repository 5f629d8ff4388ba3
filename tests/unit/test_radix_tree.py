"""The radix tree over token ids: every holder is found with the exact number of tokens it has in common."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st

from cppbatch.engine.kv.radix_tree import RadixTree, Tokens
from tests.support.randomised import randomised

Entries = dict[str, tuple[str, list[int]]]
"""Each holder's salt and tokens."""


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def tree_of(salt: str = "", **holders: tuple[int, ...]) -> RadixTree[str]:
    tree: RadixTree[str] = RadixTree()
    for holder, tokens in holders.items():
        tree.insert(holder, ids(*tokens), salt)
    return tree


def found(tree: RadixTree[str], *tokens: int, salt: str = "") -> list[tuple[str, int]]:
    return list(tree.matches(ids(*tokens), salt))


def n_nodes(tree: RadixTree[str]) -> int:
    nodes = list(tree._roots.values())
    for node in nodes:
        nodes += node.children.values()
    return len(nodes)


@pytest.mark.parametrize(
    ("asked", "n"),
    [((1, 2, 3, 4), 4), ((1, 2, 3, 4, 5), 4), ((1, 2, 3), 3), ((1, 2, 9, 4), 2), ((1,), 1)],
    ids=["the same", "longer", "shorter", "parting inside", "one token"],
)
def test_a_holder_is_found_with_the_tokens_it_has_in_common(asked: tuple[int, ...], n: int) -> None:
    assert found(tree_of(a=(1, 2, 3, 4)), *asked) == [("a", n)]


@pytest.mark.parametrize("asked", [(), (9,), (2, 3, 4)], ids=["nothing", "another token", "its middle"])
def test_a_holder_with_nothing_in_common_is_not_found(asked: tuple[int, ...]) -> None:
    assert found(tree_of(a=(1, 2, 3, 4)), *asked) == []


def test_the_longest_is_found_first() -> None:
    tree = tree_of(two=(1, 2), four=(1, 2, 3, 4), one=(1, 9), three=(1, 2, 3, 9), none=(9,))
    assert found(tree, 1, 2, 3, 4, 5) == [("four", 4), ("three", 3), ("two", 2), ("one", 1)]


def test_several_may_hold_the_same_tokens() -> None:
    tree = tree_of(a=(1, 2, 3), b=(1, 2, 3))
    assert dict(found(tree, 1, 2, 3)) == {"a": 3, "b": 3}
    tree.discard("a")
    assert found(tree, 1, 2, 3) == [("b", 3)]


def test_an_edge_is_split_where_a_newcomer_parts_or_ends() -> None:
    tree = tree_of(long=(1, 2, 3, 4, 5, 6))
    tree.insert("parts", ids(1, 2, 3, 9), "")
    tree.insert("ends", ids(1, 2), "")
    assert found(tree, 1, 2, 3, 4, 5, 6) == [("long", 6), ("parts", 3), ("ends", 2)]
    assert found(tree, 1, 2, 3, 9) == [("parts", 4), ("long", 3), ("ends", 2)]
    assert dict(found(tree, 1, 2)) == {"long": 2, "parts": 2, "ends": 2}


def test_salts_never_meet() -> None:
    tree = tree_of(salt="a", first=(1, 2, 3))
    tree.insert("second", ids(1, 2, 3), "b")
    assert found(tree, 1, 2, 3, salt="a") == [("first", 3)]
    assert found(tree, 1, 2, 3, salt="b") == [("second", 3)]
    assert found(tree, 1, 2, 3) == []
    assert tree.covers("first") == tree.covered_by("first") == []


def test_inserting_again_replaces_tokens_and_salt() -> None:
    tree = tree_of(a=(1, 2, 3))
    tree.insert("a", ids(1, 2, 4, 5), "")
    assert found(tree, 1, 2, 3) == [("a", 2)]
    tree.insert("a", ids(7, 8), "salt")
    assert found(tree, 1, 2, 4, 5) == []
    assert found(tree, 7, 8, salt="salt") == [("a", 2)]
    assert len(tree._entries) == 1


def test_a_discarded_holder_is_not_found_any_more() -> None:
    tree = tree_of(a=(1, 2, 3), b=(1, 2))
    tree.discard("a")
    assert ("a" in tree._entries, "b" in tree._entries, len(tree._entries)) == (False, True, 1)
    assert found(tree, 1, 2, 3) == [("b", 2)]


def test_discarding_an_unknown_holder_changes_nothing() -> None:
    tree = tree_of(a=(1, 2, 3))
    tree.discard("nobody")
    tree.discard("a")
    tree.discard("a")
    assert (len(tree._entries), found(tree, 1, 2, 3)) == (0, [])


@pytest.mark.parametrize("order", ["abcd", "dcba", "bdac"])
def test_when_all_are_discarded_no_nodes_are_left(order: str) -> None:
    tree = tree_of(a=(1, 2, 3, 4), b=(1, 2, 9), c=(1,), d=(5, 6))
    tree.insert("b", ids(1, 2, 9, 9), "salt")
    assert n_nodes(tree) > 4
    for holder in order:
        tree.discard(holder)
    assert n_nodes(tree) == len(tree._roots) == len(tree._entries) == 0


def test_discarding_removes_the_nodes_that_only_it_went_through() -> None:
    tree = tree_of(a=(1, 2, 3, 4))
    before = n_nodes(tree)
    for i in range(5, 50):
        tree.insert("b", ids(i, i + 1, i + 2), "")
    tree.discard("b")
    assert n_nodes(tree) == before


def test_a_holder_of_no_tokens_is_never_found() -> None:
    tree = tree_of(empty=(), a=(1, 2))
    assert found(tree, 1, 2) == [("a", 2)]
    assert tree.covered_by("empty") == []
    tree.discard("empty")
    tree.discard("a")
    assert n_nodes(tree) == 0


def test_covered_by_returns_its_prefixes_and_covers_returns_its_extensions() -> None:
    tree = tree_of(short=(1, 2), same=(1, 2, 3), long=(1, 2, 3, 4), parted=(1, 2, 9), me=(1, 2, 3))
    assert set(tree.covered_by("me")) == {"short", "same"}
    assert set(tree.covers("me")) == {"long", "same"}
    assert set(tree.covers("short")) == {"same", "long", "parted", "me"}
    assert tree.covers("long") == []


SALTS = st.sampled_from(("", "a"))
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
INSERT = st.tuples(st.just("insert"), st.sampled_from("stuvwxyz"), SALTS, TOKENS)
DISCARD = st.tuples(st.just("discard"), st.sampled_from("stuvwxyz"), st.just(""), st.just([0]))


@randomised(
    ring=100,
    soak=400,
    actions=st.lists(INSERT | INSERT | DISCARD, max_size=20),
    asked=st.lists(TOKENS | st.just([]), max_size=4),
)
def test_after_any_history_the_tree_gives_what_comparing_all_gives(
    actions: list[tuple[str, str, str, list[int]]], asked: list[list[int]]
) -> None:
    tree: RadixTree[str] = RadixTree()
    model: Entries = {}
    for action, holder, salt, tokens in actions:
        if action == "insert":
            tree.insert(holder, ids(*tokens), salt)
            model[holder] = (salt, tokens)
        else:
            tree.discard(holder)
            model.pop(holder, None)
    check_matches(tree, model, asked)
    check_covers(tree, model)
    for holder in model:
        tree.discard(holder)
    assert n_nodes(tree) == 0


def check_matches(tree: RadixTree[str], model: Entries, asked: list[list[int]]) -> None:
    for salt in ("", "a"):
        for tokens in [*asked, *(its for _, its in model.values())]:
            matches = found(tree, *tokens, salt=salt)
            assert dict(matches) == by_comparing(model, tokens, salt)
            lengths = [n for _, n in matches]
            assert len(matches) == len(dict(matches)), "a holder came twice"
            assert lengths == sorted(lengths, reverse=True)


def by_comparing(model: Entries, tokens: list[int], salt: str) -> dict[str, int]:
    common = {holder: n_common(tokens, its) for holder, (its_salt, its) in model.items() if its_salt == salt}
    return {holder: n for holder, n in common.items() if n > 0}


def n_common(a: list[int], b: list[int]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def check_covers(tree: RadixTree[str], model: Entries) -> None:
    assert len(tree._entries) == len(model)
    for holder, (salt, tokens) in model.items():
        others = {name: its for name, (its_salt, its) in model.items() if its_salt == salt and name != holder}
        assert sorted(tree.covers(holder)) == sorted(o for o, its in others.items() if its[: len(tokens)] == tokens)
        assert sorted(tree.covered_by(holder)) == sorted(o for o, its in others.items() if tokens[: len(its)] == its)


def test_a_tree_is_as_small_as_its_current_contents_allow() -> None:
    tree: RadixTree[str] = RadixTree()
    tokens = np.zeros(300, np.int32)
    tree.insert("stays", tokens, "")
    for n in range(1, 299):
        tree.insert("goes", np.append(tokens[:n], 7).astype(np.int32), "")
        tree.discard("goes")
    (child,) = tree._roots[""].children.values()
    assert (len(child.edge), child.children) == (300, {})
    assert dict(tree.matches(tokens[:200], "")) == {"stays": 200}
