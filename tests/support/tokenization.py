"""Texts with special tokens, and that tokenising them in parts gives the tokens of the whole."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from cppbatch.llama import vocab as text_splitting
from cppbatch.llama.vocab import Vocab

_SNIPPETS = ["<|im_start|>", "<|im_end|>", "<|im", "_start|>", "<|endoftext|>", "<s>", "</s>", "user", "\n", " ", "é"]
SPECIAL_TEXTS = st.lists(st.sampled_from(_SNIPPETS), max_size=60).map("".join)


def assert_parts_give_the_whole(vocab: Vocab, text: str) -> None:
    whole = [vocab._tokenize(text, True, parse).tolist() for parse in (True, False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_splitting, "_MIN_PART_CHARACTERS", 8)
        parts = [vocab.tokenize(text, parse_special=parse).tolist() for parse in (True, False)]
    if whole[0][:2] == [vocab.bos] * 2 and vocab.adds_bos:
        whole[0] = whole[0][1:]
    assert parts == whole
