"""The default model's vocabulary: parts of a text, and long texts of special tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import thread_time
from typing import Any

import pytest
from hypothesis import given, settings

from cppbatch.llama import Model
from cppbatch.llama.vocab import Vocab
from tests.support.tokenization import SPECIAL_TEXTS, assert_parts_give_the_whole


@pytest.fixture(scope="module")
def default_vocab(default_model: Path) -> Iterator[Vocab]:
    with Model(default_model) as model:
        yield model.vocab


@given(text=SPECIAL_TEXTS)
@settings(max_examples=300, deadline=None)
def test_parts_give_the_tokens_of_the_whole(default_vocab: Vocab, text: str) -> None:
    assert_parts_give_the_whole(default_vocab, text)


def test_long_texts_of_special_tokens_are_tokenised_in_short_parts(
    default_vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's time grows with the square of their number."""
    real, lengths = default_vocab._tokenize, []

    def tokenize(text: str, *options: bool) -> Any:
        lengths.append(len(text))
        return real(text, *options)

    monkeypatch.setattr(default_vocab, "_tokenize", tokenize)
    assert len(default_vocab.tokenize("<|im_start|>user\nhi<|im_end|>\n" * 5000)) == 6 * 5000
    assert max(lengths) < 4000


@pytest.mark.soak
def test_long_texts_of_special_tokens_take_time_by_their_length(default_vocab: Vocab) -> None:
    """40,000 tiny messages took 16 times as long as 10,000."""

    def seconds(n: int) -> float:
        text = "<|im_start|>user\nhi<|im_end|>\n" * n
        began = thread_time()
        assert len(default_vocab.tokenize(text)) == 6 * n
        return thread_time() - began

    assert min(seconds(40_000) for _ in range(2)) < 8 * min(seconds(10_000) for _ in range(2))
