"""A vocabulary as llguidance wants it, which tokenises by llama.cpp itself."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from llguidance import LLTokenizer

from cppbatch.llama.library import C

if TYPE_CHECKING:
    from cppbatch.llama.vocab import Vocab

_SPECIAL = b"\xff"  # in front of a token's bytes: a grammar's text does not match it


def grammar_tokenizer(vocab: Vocab) -> Any:
    """An `LLTokenizer`; a third of a second for 49,152 tokens. It must not be used after the model is closed."""
    return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
        tokens=[_bytes(vocab, token) for token in range(vocab.n_tokens)],
        vocab_ptr=vocab.handle,
        tokenize_fptr=ctypes.cast(C._lib.llama_tokenize, ctypes.c_void_p).value,
        eos_token=sorted(vocab.eog) or None,
        slices=None,
    )


def _bytes(vocab: Vocab, token: int) -> bytes:
    """What a token adds to the text; those that add nothing, and names in angle brackets, are no text to a grammar."""
    piece = vocab.piece(token)
    is_name = piece.startswith(b"<") and piece.endswith(b">") and vocab.is_user_defined(token)
    return piece if piece and not is_name else _SPECIAL + (vocab.piece(token, special=True) or b"<%d>" % token)
