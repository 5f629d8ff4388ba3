"""A vocabulary as llguidance wants it, which tokenises by llama.cpp itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cppbatch.llama.vocab import Vocab


def grammar_tokenizer(vocab: Vocab) -> Any:
    """An `llguidance.LLTokenizer`; a third of a second for 49,152 tokens. It must not outlive the model."""
    from llguidance.llamacpp import lltokenizer_from_vocab

    return lltokenizer_from_vocab(vocab.handle, eos_token=sorted(vocab.eog) or None)
