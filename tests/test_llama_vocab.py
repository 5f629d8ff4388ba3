"""Vocab: any text comes back from its token ids, and no id out of range reaches llama.cpp."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cppbatch.errors import ModelError, OutOfRange
from cppbatch.llama.library import C
from cppbatch.llama.vocab import Vocab, _pieces_of


@pytest.fixture(scope="module")
def vocab(llama_model):
    return llama_model.vocab


@given(text=st.text().map(lambda text: text.replace("\u2581", " ")))  # SentencePiece's own mark of a space
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_from_its_tokens(vocab, text):
    tokens = vocab.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(vocab.piece(int(token)) for token in tokens) == text.encode()


@given(text=st.text().filter(lambda text: not text.startswith("<s>")))
@settings(max_examples=100, deadline=None)
def test_every_text_starts_with_exactly_one_bos(vocab, text):
    for written in (text, "<s>" + text):
        tokens = vocab.tokenize(written).tolist()
        assert tokens[0] == vocab.bos
        assert vocab.bos not in tokens[1:2]


def test_text_that_python_cannot_encode_does_not_raise(vocab):
    assert vocab.tokenize("\ud800", add_special=False).tolist() == vocab.tokenize("?", add_special=False).tolist()


def test_special_tokens_are_parsed_only_on_demand(vocab):
    assert vocab.tokenize("<|im_end|>", add_special=False).tolist() == [vocab.eot]
    assert len(vocab.tokenize("<|im_end|>", add_special=False, parse_special=False)) > 1


def test_pieces_are_bytes_even_when_half_a_character(vocab):
    tokens = vocab.tokenize("é", add_special=False).tolist()
    assert [vocab.piece(token) for token in tokens] == [b"\xc3", b"\xa9"]


def test_control_tokens_have_no_piece_but_a_text(vocab):
    assert vocab.piece(vocab.eos) == b""
    assert vocab.text(vocab.eos) == "</s>"
    assert vocab.text(-1) == ""


def test_every_ending_token_is_known(vocab):
    assert {vocab.eos, vocab.eot} <= vocab.eog
    assert vocab.bos not in vocab.eog


@pytest.mark.parametrize("token", [-1, 512, 2**31])
def test_ids_out_of_range_are_refused(vocab, token):
    with pytest.raises(OutOfRange, match=str(token)):
        vocab.piece(token)


def test_a_model_without_a_tokenizer_is_refused(monkeypatch):
    monkeypatch.setattr(C, "llama_vocab_type", lambda handle: 0)
    with pytest.raises(ModelError, match="model-x has no tokenizer"):
        Vocab(object(), "model-x")


@pytest.mark.parametrize("text", ["", "a b", "a" * 4000, "a" * 50_001, " " * 9000, "x" * 5000 + " " * 5000 + "y"])
def test_long_runs_are_cut_and_nothing_is_lost(text):
    pieces = list(_pieces_of(text))
    assert "".join(pieces) == text
    assert all(len(piece) <= 8000 for piece in pieces)
    assert len(pieces) == 1 or len(text) >= 4000
