"""Long texts are cut in front of special tokens, and nothing is lost."""

from __future__ import annotations

from time import thread_time
from typing import Any

import pytest

from cppbatch.llama.vocab import SpecialTokenSplitter, split_long_runs


@pytest.mark.parametrize("text", ["", "a b", "a" * 4000, "a" * 50_001, " " * 9000, "x" * 5000 + " " * 5000 + "y"])
def test_long_runs_are_cut_and_nothing_is_lost(text: Any) -> None:
    pieces = list(split_long_runs(text))
    assert "".join(pieces) == text
    assert all(len(piece) <= 8000 for piece in pieces)
    assert len(pieces) == 1 or len(text) >= 4000


def test_a_text_is_cut_in_front_of_special_tokens_only_where_none_reaches_over_the_cut() -> None:
    parts = SpecialTokenSplitter(["<a>", "x<a"], absorb_left=frozenset(["x<a"]))
    assert list(parts.split("-" * 2000 + "x<a>" + "-" * 200 + "<a>" + "-" * 2000)) == [
        "-" * 2000 + "x<a>" + "-" * 200,
        "<a>" + "-" * 2000,
    ]


def test_runs_that_are_just_short_enough_take_no_time() -> None:
    """Each was looked at from each of its letters: 3.8 s for a megabyte, with Python's lock held."""
    text = ("a" * 3999 + " ") * 260
    began = thread_time()
    assert list(split_long_runs(text)) == [text]
    assert thread_time() - began < 2  # of CPU time; it takes 0.03 s
