"""A model's vocabulary: text to token ids and back."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from cppbatch.errors import LlamaError, ModelError, OutOfRange, RequestCancelled
from cppbatch.llama.library import C
from cppbatch.llama.sampler_chain import DrySampler
from cppbatch.llama.text_splitting import SpecialTokenSplitter, split_long_runs

_MAX_DRY_SAMPLERS = 16
_VOCAB_TYPE_NONE, _VOCAB_TYPE_SPM, _VOCAB_TYPE_BPE, _VOCAB_TYPE_WPM, _VOCAB_TYPE_UGM = 0, 1, 2, 3, 4
_INT32_MAX = 2**31 - 1
_MAX_WORD_BYTES = 2048  # text of one token where white space is dropped and an unknown word is one token
_SPECIAL = b"\xff"  # llguidance's prefix for special tokens


class Vocab:
    """The vocabulary of a loaded model. Thread-safe; valid as long as its model is open."""

    def __init__(self, handle: Any, model_name: str) -> None:
        if C.llama_vocab_type(handle) == _VOCAB_TYPE_NONE:  # tokenising would abort the process
            raise ModelError(f"{model_name} has no tokenizer in it, so it cannot read or write text")
        if C.llama_vocab_type(handle) == _VOCAB_TYPE_SPM and not _has_all_bytes(handle):
            raise ModelError(f"{model_name} has no tokens for single bytes, so an unknown character would crash it")
        self._handle: Any = handle
        self._splits_by_regex = C.llama_vocab_type(handle) == _VOCAB_TYPE_BPE
        self.n_tokens: int = C.llama_vocab_n_tokens(handle)
        self.bos: int = C.llama_vocab_bos(handle)
        """Id of the beginning-of-sequence token, -1 if there is none; likewise `eos` and `eot`."""
        self.eos: int = C.llama_vocab_eos(handle)
        self.eot: int = C.llama_vocab_eot(handle)
        fill_in = (C.llama_vocab_fim_pre(handle), C.llama_vocab_fim_suf(handle), C.llama_vocab_fim_mid(handle))
        self.fill_in: tuple[int, int, int] | None = None if -1 in fill_in else fill_in
        """Ids of the tokens before the prefix, the suffix and the middle, for models that can fill in."""
        self.fill_in_files: tuple[int, int] = (C.llama_vocab_fim_rep(handle), C.llama_vocab_fim_sep(handle))
        """Ids of the tokens before a repository's name and a file's; -1 where there is none."""
        self.adds_bos: bool = C.llama_vocab_get_add_bos(handle)
        self._between_pair, self._after_pair = _pair_marks(handle)
        is_eog, text_of = C.llama_vocab_is_eog, C.llama_vocab_get_text
        texts = [text_of(handle, token) for token in range(self.n_tokens)]
        drops_spaces = C.llama_vocab_type(handle) in (_VOCAB_TYPE_WPM, _VOCAB_TYPE_UGM)
        self.longest_piece: int = max(_MAX_WORD_BYTES if drops_spaces else 1, *map(len, texts))
        """Bytes of text that one token stands for at most."""
        self._parts, self._plain_parts = _text_parts(handle, texts)
        self.eog = frozenset(token for token in range(self.n_tokens) if is_eog(handle, token))
        """Ids of every token that ends a generation."""
        self.suppressed = _suppressed(handle)
        """Ids that the model's file says must never come."""
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._grammar_tokenizer: Any = None
        self._dry_samplers: OrderedDict[tuple[object, ...], DrySampler] = OrderedDict()
        self._lock = threading.Lock()

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> npt.NDArray[np.int32]:
        """The ids of `text`, int32[n].

        `add_special` adds BOS (or EOS) where the model wants it; `parse_special` reads "<|im_start|>" and the like
        as the one token they name. A text that already starts with BOS does not get a second one. With BPE,
        a run of thousands of characters without a space is tokenised in parts.
        `cancelled` is asked between the parts of a long text. Raises `RequestCancelled`, `OutOfRange`.
        """
        parts = (self._parts if parse_special else self._plain_parts).of(text)
        pieces = [piece for part in parts for piece in (split_long_runs(part) if self._splits_by_regex else [part])]
        if len(pieces) == 1:
            tokens = self._tokenize(text, add_special, parse_special)
        else:
            found = []
            for piece in pieces:
                if cancelled():
                    raise RequestCancelled("cancelled while its text was tokenised")
                found.append(self._tokenize(piece, False, parse_special))
            tokens = np.concatenate(found)
            if add_special:
                around = self._tokenize("", True, parse_special)
                n_before = int(self.adds_bos and len(around) > 0)
                tokens = np.concatenate([around[:n_before], tokens, around[n_before:]])
        if add_special and self.adds_bos and len(tokens) > 1 and tokens[0] == tokens[1] == self.bos:
            tokens = tokens[1:]
        return tokens

    def tokenize_pair(self, query: str, document: str) -> npt.NDArray[np.int32]:
        """The ids of two texts as rerankers read them: BOS, query, EOS, SEP, document, EOS, int32[n].

        Of these marks, those that the vocabulary says it adds; in the texts no such mark is read as one token.
        """
        before = [self.bos] if self.adds_bos else []
        texts = [self.tokenize(text, add_special=False, parse_special=False) for text in (query, document)]
        parts = (before, texts[0], self._between_pair, texts[1], self._after_pair)
        return np.concatenate([np.asarray(part, np.int32) for part in parts])

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> npt.NDArray[np.int32]:
        raw = text.encode("utf-8", "replace")
        if len(raw) > _INT32_MAX:
            raise OutOfRange(f"a text of {len(raw)} bytes is too long to tokenise; the limit is {_INT32_MAX}")
        room = len(raw) + 2
        while True:
            out = np.empty(room, np.int32)
            pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = C.llama_tokenize(self.handle, raw, len(raw), pointer, room, add_special, parse_special)
            if n == -_INT32_MAX - 1:
                raise LlamaError("the text has too many tokens to count")
            if n >= 0:
                tokens: npt.NDArray[np.int32] = out[:n].copy()
                return tokens
            room = -n  # some vocabularies need more tokens than bytes

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, possibly half a UTF-8 character; empty for control tokens, unless `special`."""
        piece = self._pieces.get((token, special))
        if piece is None:
            if not 0 <= token < self.n_tokens:
                raise OutOfRange(f"token id {token} is not in this vocabulary of {self.n_tokens}")
            piece = self._pieces[token, special] = self._piece(token, special=special)
        return piece

    def text(self, token: int) -> str:
        """A token as text, control tokens included ("<|im_end|>"); "" for a token the model does not have (-1)."""
        return self.piece(token, special=True).decode("utf-8", "replace") if 0 <= token < self.n_tokens else ""

    def is_user_defined(self, token: int) -> bool:
        """Whether the token was added to the vocabulary by hand, as `<tool_call>` and the like are."""
        return bool(C.llama_vocab_get_attr(self.handle, token) & C.LLAMA_TOKEN_ATTR_USER_DEFINED)

    def for_grammars(self) -> Any:
        """The vocabulary as an `llguidance.LLTokenizer`, made at the first call."""
        with self._lock:
            if self._grammar_tokenizer is None:
                self._grammar_tokenizer = self._make_grammar_tokenizer()
            return self._grammar_tokenizer

    def _make_grammar_tokenizer(self) -> LLTokenizer:
        """Takes a third of a second for 49,152 tokens. It calls `llama_tokenize` itself, so the model must be open."""
        return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined, no-any-return]
            tokens=[self._grammar_bytes(token) for token in range(self.n_tokens)],
            vocab_ptr=self.handle,
            tokenize_fptr=ctypes.cast(C._lib.llama_tokenize, ctypes.c_void_p).value,
            eos_token=sorted(self.eog) or None,
            slices=None,
        )

    def _grammar_bytes(self, token: int) -> bytes:
        """What a token adds to a text that a grammar matches; special tokens get a prefix that no grammar matches.

        Special are tokens that add nothing, and user-defined names in angle brackets.
        """
        piece = self.piece(token)
        is_name = piece.startswith(b"<") and piece.endswith(b">") and self.is_user_defined(token)
        return piece if piece and not is_name else _SPECIAL + (self.piece(token, special=True) or b"<%d>" % token)

    def dry_sampler(
        self, *, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: tuple[str, ...]
    ) -> DrySampler:
        """A DRY sampler to clone; those used last are kept, as looking up the breakers takes a while."""
        key = multiplier, base, allowed_length, last_n, breakers
        with self._lock:
            if key not in self._dry_samplers:
                self._dry_samplers[key] = DrySampler(
                    self.handle,
                    multiplier=multiplier,
                    base=base,
                    allowed_length=allowed_length,
                    last_n=last_n,
                    breakers=breakers,
                )
            self._dry_samplers.move_to_end(key)
            if len(self._dry_samplers) > _MAX_DRY_SAMPLERS:
                self._dry_samplers.popitem(last=False)
            return self._dry_samplers[key]

    def _piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = C.llama_token_to_piece(self.handle, token, buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer. Raises `LlamaError` when the model is closed."""
        if self._handle is None:
            raise LlamaError("the vocabulary's model is closed")
        return self._handle

    def close(self) -> None:
        """Called by the model when it goes: the vocabulary is part of it."""
        self._handle = self._grammar_tokenizer = None


def _text_parts(handle: Any, texts: list[bytes]) -> tuple[SpecialTokenSplitter, SpecialTokenSplitter]:
    """For texts in which special tokens are read, and for those in which only tokens are that users have defined."""
    special, defined = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN, C.LLAMA_TOKEN_ATTR_USER_DEFINED
    attributes = [C.llama_vocab_get_attr(handle, token) for token in range(len(texts))]

    def of_kind(kind: int) -> SpecialTokenSplitter:
        known = [
            (text.decode(), attribute)
            for text, attribute in zip(texts, attributes, strict=True)
            if attribute & kind and text.decode(errors="ignore").encode() == text
        ]
        cuts = (text for text, attribute in known if not attribute & C.LLAMA_TOKEN_ATTR_LSTRIP)
        return SpecialTokenSplitter((text for text, _ in known), cuts)

    return of_kind(special | defined), of_kind(defined)


def _pair_marks(handle: Any) -> tuple[list[int], list[int]]:
    """What comes between two texts, and after them.

    BERT's own vocabularies have no EOS. SEP ends each text there, the second one too, as the models were trained;
    llama.cpp's server leaves that last one out.
    """
    sep, eos = C.llama_vocab_sep(handle), C.llama_vocab_eos(handle)
    if C.llama_vocab_type(handle) == _VOCAB_TYPE_WPM:
        return [sep], [sep]
    end = [eos if eos >= 0 else sep] if C.llama_vocab_get_add_eos(handle) else []
    return [*end, *([sep] if C.llama_vocab_get_add_sep(handle) else [])], end


def _suppressed(handle: Any) -> frozenset[int]:
    n = ctypes.c_int32()
    ids = C.llama_vocab_get_suppress_tokens(handle, ctypes.byref(n))
    return frozenset(ids[: n.value]) if n.value else frozenset()


def _has_all_bytes(handle: Any) -> bool:
    """Whether a SentencePiece vocabulary can spell every byte; llama.cpp aborts the process on one it cannot."""
    missing = {f"<0x{byte:02X}>".encode() for byte in range(256)}
    for token in range(C.llama_vocab_n_tokens(handle)):
        missing.discard(C.llama_vocab_get_text(handle, token))
        if not missing:
            return True
    return False
