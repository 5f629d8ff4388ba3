"""Vocab: any text comes back from its token ids, and no id out of range reaches llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cppbatch.errors import ModelError, OutOfRange, RequestCancelled
from cppbatch.llama import Model
from cppbatch.llama.library import C
from cppbatch.llama.owned import Owned
from cppbatch.llama.vocab import Vocab
from tests.support.tokenization import SPECIAL_TEXTS, assert_parts_give_the_whole


@pytest.fixture(scope="module")
def vocab(llama_model: Model) -> Vocab:
    return llama_model.vocab


@given(text=st.text().map(lambda text: text.replace("\u2581", " ")))  # SentencePiece's own mark of a space
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_from_its_tokens(vocab: Vocab, text: str) -> None:
    tokens = vocab.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(vocab.piece(int(token)) for token in tokens) == text.encode()


@given(text=st.text().filter(lambda text: not text.startswith("<s>")))
@settings(max_examples=100, deadline=None)
def test_every_text_starts_with_exactly_one_bos(vocab: Vocab, text: str) -> None:
    for written in (text, "<s>" + text):
        tokens = vocab.tokenize(written).tolist()
        assert tokens[0] == vocab.bos
        assert vocab.bos not in tokens[1:2]


def test_text_that_python_cannot_encode_does_not_raise(vocab: Vocab) -> None:
    assert vocab.tokenize("\ud800", add_special=False).tolist() == vocab.tokenize("?", add_special=False).tolist()


def test_special_tokens_are_parsed_only_on_demand(vocab: Vocab) -> None:
    assert vocab.tokenize("<|im_end|>", add_special=False).tolist() == [vocab.eot]
    assert len(vocab.tokenize("<|im_end|>", add_special=False, parse_special=False)) > 1


def test_pieces_are_bytes_even_when_half_a_character(vocab: Vocab) -> None:
    tokens = vocab.tokenize("é", add_special=False).tolist()
    assert [vocab.piece(token) for token in tokens] == [b"\xc3", b"\xa9"]


def test_control_tokens_have_no_piece_but_a_text(vocab: Vocab) -> None:
    assert vocab.piece(vocab.eos) == b""
    assert vocab.text(vocab.eos) == "</s>"
    assert vocab.text(-1) == ""


def test_every_ending_token_is_known(vocab: Vocab) -> None:
    assert {vocab.eos, vocab.eot} <= vocab.eog
    assert vocab.bos not in vocab.eog


@pytest.mark.parametrize("token", [-1, 512, 2**31])
def test_ids_out_of_range_are_refused(vocab: Vocab, token: Any) -> None:
    with pytest.raises(OutOfRange, match=str(token)):
        vocab.piece(token)


def test_a_model_without_a_tokenizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C, "llama_vocab_type", lambda handle: 0)
    with pytest.raises(ModelError, match="model-x contains no tokenizer"):
        Vocab(object(), Path("model-x"), Owned(object(), lambda pointer: None))


def test_a_cancelled_text_is_not_tokenised_to_its_end(vocab: Vocab) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(RequestCancelled):
        vocab.tokenize("<|im_end|>x" * 10_000, cancelled=cancelled)
    assert len(asked) == 3


@given(text=SPECIAL_TEXTS)
@settings(max_examples=300, deadline=None)
def test_parts_give_the_tokens_of_the_whole(vocab: Vocab, text: str) -> None:
    assert_parts_give_the_whole(vocab, text)
