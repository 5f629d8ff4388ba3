"""A model's vocabulary: text to token ids and back."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.errors import LlamaError, ModelError, OutOfRange, RequestCancelled
from cppbatch.findings import finding_key, finding_path, read_finding, write_finding
from cppbatch.llama.library import C, library_path
from cppbatch.llama.owned import Owned
from cppbatch.llama.sampler_chain import DrySampler
from cppbatch.models.find import model_parts
from cppbatch.setting import INT32_MAX
from cppbatch.text_patterns import any_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer


_MANY_TOKENS = 8192  # reading the properties of fewer tokens is faster than a cache lookup
_VOCAB_TYPE_NONE, _VOCAB_TYPE_SPM, _VOCAB_TYPE_BPE, _VOCAB_TYPE_WPM, _VOCAB_TYPE_UGM = 0, 1, 2, 3, 4
_SPECIAL = b"\xff"  # llguidance's prefix for special tokens
_SPACES = " \t\n\v\f\r"  # that special tokens absorb

Span = tuple[int, int]
"""The start and the end of a part of a text, in characters."""


class _SpecialToken(msgspec.Struct, frozen=True, array_like=True):
    """A token that is control, user-defined or unknown."""

    id: int
    text: bytes
    attribute: int
    """llama.cpp's `llama_token_attr`."""


class _Tokens(msgspec.Struct, frozen=True):
    """The properties of all tokens of a vocabulary, read with three llama.cpp calls per token, about a microsecond."""

    longest: int
    """Bytes."""
    special: list[_SpecialToken]
    eog: frozenset[int]


class Vocab:
    """The vocabulary of a loaded model. Thread-safe; valid until the model is closed."""

    def __init__(self, handle: Any, path: Path, model: Owned, overrides: Sequence[object] = ()) -> None:
        """`handle`: llama.cpp's pointer, of `model`, which was loaded from `path` with these `overrides` of its
        metadata and stays open as long as this. The slow-to-read properties of a large vocabulary are cached for this
        file. Raises `ModelError` if the tokenizer is missing or would crash."""
        model_name = path.name
        if C.llama_vocab_type(handle) == _VOCAB_TYPE_NONE:  # llama_tokenize would abort the process
            raise ModelError(f"{model_name} contains no tokenizer, so it cannot process text")
        if C.llama_vocab_type(handle) == _VOCAB_TYPE_SPM and not _has_all_bytes(handle):
            raise ModelError(f"{model_name} has no byte tokens, so llama.cpp would crash on an unknown character")
        self._handle: Any = handle
        self._model: Owned | None = model
        self._splits_by_regex = C.llama_vocab_type(handle) == _VOCAB_TYPE_BPE
        self.n_tokens: int = C.llama_vocab_n_tokens(handle)
        self.bos: int = C.llama_vocab_bos(handle)
        """Id of the beginning-of-sequence token, -1 if there is none; likewise for `eos` and `eot`."""
        self.eos: int = C.llama_vocab_eos(handle)
        self.eot: int = C.llama_vocab_eot(handle)
        fill_in = (C.llama_vocab_fim_pre(handle), C.llama_vocab_fim_suf(handle), C.llama_vocab_fim_mid(handle))
        self.fill_in: tuple[int, int, int] | None = None if -1 in fill_in else fill_in
        """Ids of the fill-in-the-middle tokens before prefix, suffix and middle; None if the model has none."""
        self.fill_in_files: tuple[int, int] = (C.llama_vocab_fim_rep(handle), C.llama_vocab_fim_sep(handle))
        """Ids of the fill-in-the-middle tokens before the name of a repository and of a file; -1 if there is none."""
        self.adds_bos: bool = C.llama_vocab_get_add_bos(handle)
        self._pair_separator, self._pair_end = _pair_special_tokens(handle)
        tokens = _read_tokens(handle, self.n_tokens, path, overrides)
        drops_spaces = C.llama_vocab_type(handle) in (_VOCAB_TYPE_WPM, _VOCAB_TYPE_UGM)
        # 2048 bytes of text may be one token, if white space is dropped and an unknown word is one token
        self.longest_piece: int = max(2048 if drops_spaces else 1, tokens.longest)
        """Maximum bytes of text in one token."""
        self._special_splitter, self._plain_splitter = _splitters(tokens.special)
        self.control_texts = _control_texts(tokens.special)
        """The texts of the tokens that are not read in plain text: control tokens, and the unknown token."""
        self.eog = tokens.eog
        """Ids of all tokens that end a generation."""
        self.markers = _markers(self.n_tokens, tokens.special)
        """Whether each token is only written by chat templates, bool[n_tokens]: control tokens, and user-defined
        `<...>`."""
        self.suppressed = _suppressed_tokens(handle)
        """Ids that must never be sampled, according to the model file."""
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._grammar_tokenizer: Any = None
        self._dry_samplers: OrderedDict[tuple[object, ...], DrySampler] = OrderedDict()
        self._lock = threading.Lock()

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = True,
        add_eos: bool = True,
        parse_special: bool = True,
        plain: Sequence[Span] = (),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> npt.NDArray[np.int32]:
        """The token ids of `text`, int32[n].

        `add_special` adds BOS and EOS if the model uses them, but not a second BOS to a text that starts with it;
        without `add_eos`, BOS only. `parse_special` reads the text of a special token, for example "<|im_start|>", as
        that token, except in the `plain` ranges of characters, which are in order and do not overlap. With BPE, a run
        of thousands of characters without a space is tokenised in parts.
        `cancelled` is called between the parts of a long text. Raises `RequestCancelled`, `OutOfRange`.
        """
        found: list[npt.NDArray[np.int32]] = []
        sections = self._special_splitter.sections(text, plain) if parse_special else [(text, False)]
        for section, is_parsed in sections:
            for part in (self._special_splitter if is_parsed else self._plain_splitter).split(section):
                for piece in split_long_runs(part) if self._splits_by_regex else (part,):
                    if found and cancelled():
                        raise RequestCancelled("cancelled during tokenisation")
                    found.append(self._tokenize(piece, False, is_parsed))
        if add_special:
            before, after = self._around
            found = [before, *found, after] if add_eos else [before, *found]
        tokens = np.concatenate(found)
        if add_special and self.adds_bos and len(tokens) > 1 and tokens[0] == tokens[1] == self.bos:
            tokens = tokens[1:]
        return tokens

    @cached_property
    def _around(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The tokens that the model adds before and after a text."""
        around = self._tokenize("", True, True)
        n_before = int(self.adds_bos and len(around) > 0)
        return around[:n_before], around[n_before:]

    def tokenize_pair(self, query: str, document: str) -> npt.NDArray[np.int32]:
        """The input of a reranker: BOS, query, EOS, SEP, document, EOS as token ids, int32[n].

        Only the special tokens that the vocabulary adds are used. Special tokens in the texts are read as plain text.
        """
        before = [self.bos] if self.adds_bos else []
        texts = [self.tokenize(text, add_special=False, parse_special=False) for text in (query, document)]
        parts = (before, texts[0], self._pair_separator, texts[1], self._pair_end)
        return np.concatenate([np.asarray(part, np.int32) for part in parts])

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> npt.NDArray[np.int32]:
        raw = text.encode("utf-8", "replace")
        if len(raw) > INT32_MAX:
            raise OutOfRange(f"a text of {len(raw)} bytes is too long to tokenise; the limit is {INT32_MAX}")
        size = len(raw) + 2
        while True:
            out = np.empty(size, np.int32)
            pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = C.llama_tokenize(self.handle, raw, len(raw), pointer, size, add_special, parse_special)
            if n == -INT32_MAX - 1:
                raise LlamaError("the text has too many tokens to count")
            if n >= 0:
                tokens: npt.NDArray[np.int32] = out[:n].copy()
                return tokens
            size = -n  # some vocabularies need more tokens than bytes

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token, possibly part of a UTF-8 character. Control tokens are empty, unless `special`."""
        piece = self._pieces.get((token, special))
        if piece is None:
            if not 0 <= token < self.n_tokens:
                raise OutOfRange(f"token id {token} is not in the vocabulary, which has {self.n_tokens} tokens")
            piece = self._pieces[token, special] = self._piece(token, special=special)
        return piece

    def text(self, token: int) -> str:
        """The text of a token, including control tokens ("<|im_end|>"); "" for an id outside the vocabulary (-1)."""
        return self.piece(token, special=True).decode("utf-8", "replace") if 0 <= token < self.n_tokens else ""

    def is_user_defined(self, token: int) -> bool:
        """Whether the token is user-defined, for example `<tool_call>`."""
        return bool(C.llama_vocab_get_attr(self.handle, token) & C.LLAMA_TOKEN_ATTR_USER_DEFINED)

    def difference(self, other: Vocab) -> str | None:
        """The first difference between two vocabularies: the number of tokens, a special token, or the text of a token;
        None if they are the same."""
        if self.n_tokens != other.n_tokens:
            return f"{other.n_tokens} tokens instead of {self.n_tokens}"
        for name in ("bos", "eos", "eot", "adds_bos"):
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                return f"{name} is {others} instead of {mine}"
        text_of, one, two = C.llama_vocab_get_text, self.handle, other.handle
        for token in range(self.n_tokens):
            if (mine := text_of(one, token)) != (others := text_of(two, token)):
                return (
                    f"token {token} is {others.decode(errors='replace')!r} instead of {mine.decode(errors='replace')!r}"
                )
        return None

    def for_grammars(self) -> Any:
        """The vocabulary as an `llguidance.LLTokenizer`, created by the first call. Raises `ValueError` if it has no
        end token."""
        with self._lock:
            if self._grammar_tokenizer is None:
                self._grammar_tokenizer = self._make_grammar_tokenizer()
            return self._grammar_tokenizer

    def _make_grammar_tokenizer(self) -> LLTokenizer:
        """Takes a third of a second for 49,152 tokens. Calls `llama_tokenize` directly, so the model must be open."""
        from llguidance import LLTokenizer  # a slow import, which only grammars need

        if not self.eog:
            raise ValueError("grammars require an end token, which this model's vocabulary does not have")
        return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined, no-any-return]
            tokens=[self._grammar_bytes(token) for token in range(self.n_tokens)],
            vocab_ptr=self.handle,
            tokenize_fptr=ctypes.cast(C._lib.llama_tokenize, ctypes.c_void_p).value,
            eos_token=sorted(self.eog) or None,
            slices=None,
        )

    def _grammar_bytes(self, token: int) -> bytes:
        """The bytes of a token for grammars. Special tokens get a prefix that no grammar matches.

        Tokens without text and user-defined names in angle brackets are special.
        """
        piece = self.piece(token)
        is_name = piece.startswith(b"<") and piece.endswith(b">") and self.is_user_defined(token)
        return piece if piece and not is_name else _SPECIAL + (self.piece(token, special=True) or b"<%d>" % token)

    def dry_sampler(
        self, *, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: tuple[str, ...]
    ) -> DrySampler:
        """A DRY sampler to clone. An LRU cache keeps 16, because looking up the sequence breakers is slow."""
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
            if len(self._dry_samplers) > 16:
                self._dry_samplers.popitem(last=False)
            return self._dry_samplers[key]

    def _piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = C.llama_token_to_piece(self.handle, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer. Raises `LlamaError` when the model is closed."""
        if self._model is None or self._model.pointer is None:
            raise LlamaError("the vocabulary's model is closed")
        return self._handle

    def close(self) -> None:
        """Called by the model before it frees the vocabulary."""
        self._handle = self._grammar_tokenizer = self._model = None


def _read_tokens(handle: Any, n_tokens: int, path: Path, overrides: Sequence[object]) -> _Tokens:
    """The properties of all tokens; for a large vocabulary, cached for this file, overrides and library."""
    if n_tokens < _MANY_TOKENS:
        return _ask_tokens(handle, n_tokens)
    key = finding_key(Path(library_path()).parent, model_parts(path)[:1], n_tokens, *overrides)
    cached = finding_path("vocabularies", key)
    found = read_finding(cached, _Tokens)
    if found is None:
        found = _ask_tokens(handle, n_tokens)
        write_finding(cached, found)
    return found


def _ask_tokens(handle: Any, n_tokens: int) -> _Tokens:
    text_of, attribute_of, is_eog = C.llama_vocab_get_text, C.llama_vocab_get_attr, C.llama_vocab_is_eog
    kinds = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN | C.LLAMA_TOKEN_ATTR_USER_DEFINED
    attributes = [attribute_of(handle, token) for token in range(n_tokens)]
    return _Tokens(
        longest=max(len(text_of(handle, token)) for token in range(n_tokens)),
        special=[_SpecialToken(i, text_of(handle, i), each) for i, each in enumerate(attributes) if each & kinds],
        eog=frozenset(token for token in range(n_tokens) if is_eog(handle, token)),
    )


def _markers(n_tokens: int, special: list[_SpecialToken]) -> npt.NDArray[np.bool_]:
    found = np.zeros(n_tokens, np.bool_)
    for token in special:
        if token.attribute & C.LLAMA_TOKEN_ATTR_USER_DEFINED:
            found[token.id] = token.text.startswith(b"<") and token.text.endswith(b">")
        else:
            found[token.id] = token.attribute & C.LLAMA_TOKEN_ATTR_CONTROL
    return found


def _control_texts(tokens: list[_SpecialToken]) -> tuple[str, ...]:
    kinds = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN
    return tuple(token.text.decode() for token in tokens if token.attribute & kinds and _is_text(token))


def _is_text(token: _SpecialToken) -> bool:
    return bool(token.text) and token.text.decode(errors="ignore").encode() == token.text


def _splitters(tokens: list[_SpecialToken]) -> tuple[SpecialTokenSplitter, SpecialTokenSplitter]:
    """Splitters for tokenising with `parse_special`, and without it (then only user-defined tokens are special)."""
    special, defined = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN, C.LLAMA_TOKEN_ATTR_USER_DEFINED

    def of_kind(kind: int) -> SpecialTokenSplitter:
        known = {token.text.decode(): token.attribute for token in tokens if token.attribute & kind and _is_text(token)}

        def with_attribute(attribute: int) -> frozenset[str]:
            return frozenset(text for text, attributes in known.items() if attributes & attribute)

        left, right = with_attribute(C.LLAMA_TOKEN_ATTR_LSTRIP), with_attribute(C.LLAMA_TOKEN_ATTR_RSTRIP)
        return SpecialTokenSplitter(known, left, right)

    return of_kind(special | defined), of_kind(defined)


def _pair_special_tokens(handle: Any) -> tuple[list[int], list[int]]:
    """The special tokens between the two texts of a pair, and after the second one.

    BERT vocabularies have no EOS: SEP ends both texts, as in training. (llama.cpp's server omits the last SEP.)
    """
    sep, eos = C.llama_vocab_sep(handle), C.llama_vocab_eos(handle)
    if C.llama_vocab_type(handle) == _VOCAB_TYPE_WPM:
        return [sep], [sep]
    end = [eos if eos >= 0 else sep] if C.llama_vocab_get_add_eos(handle) else []
    return [*end, *([sep] if C.llama_vocab_get_add_sep(handle) else [])], end


def _suppressed_tokens(handle: Any) -> frozenset[int]:
    n = ctypes.c_int32()
    ids = C.llama_vocab_get_suppress_tokens(handle, ctypes.byref(n))
    return frozenset(ids[: n.value]) if n.value else frozenset()


def _has_all_bytes(handle: Any) -> bool:
    """Whether a SentencePiece vocabulary has all byte tokens; llama.cpp aborts the process if one is missing."""
    missing = {f"<0x{byte:02X}>".encode() for byte in range(256)}
    for token in range(C.llama_vocab_n_tokens(handle)):
        missing.discard(C.llama_vocab_get_text(handle, token))
        if not missing:
            return True
    return False


# Splits a long text into parts that tokenise to the same tokens as the whole text.
#
# llama.cpp first splits a text at special tokens, in a linked list that it walks from the head for every token found
# (`tokenizer_st_partition`): 20,000 tokens take 0.2 s, 120,000 take 4 s. In parts, the time is linear, and the caller
# can stop between two parts.


_MIN_PART_CHARACTERS = (
    1024  # characters; less than half of _MAX_RUN_CHARACTERS, so that `split_long_runs` cuts no special token
)
_MAX_RUN_CHARACTERS = 4000  # characters
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN_CHARACTERS},}}|(?<!\s)\s{{{_MAX_RUN_CHARACTERS},}}")
"""A run of non-space, or of space, characters that is too long for some BPE vocabularies: llama.cpp splits their text
with std::wregex, which recurses for each character and overflows the stack. The lookbehind restricts matches to the
start of a run; without it, a run of 3,999 characters would be scanned again from each of them."""


class SpecialTokenSplitter:
    """Splits texts before the special tokens of one vocabulary."""

    def __init__(
        self,
        special: Iterable[str],
        absorb_left: frozenset[str] = frozenset(),
        absorb_right: frozenset[str] = frozenset(),
    ) -> None:
        """`special`: the texts of all tokens that llama.cpp searches first. `absorb_left`: those that absorb white
        space on their left, before which a text is not split; `absorb_right`: on their right."""
        self._texts = tuple(special)
        self._longest = max(map(len, self._texts), default=0)
        self._absorb_left, self._absorb_right = absorb_left, absorb_right

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Compiled on first use: Gemma 3 has 6,400 special tokens, which take a tenth of a second."""
        return any_of(self._texts)

    @cached_property
    def _cut(self) -> re.Pattern[str] | None:
        """The special tokens before which a text is split."""
        absorbs = self._absorb_left
        return any_of(text for text in self._texts if text not in absorbs) if absorbs else self._special

    def sections(self, text: str, plain: Sequence[Span]) -> Iterator[tuple[str, bool]]:
        """The text in sections, and whether special tokens are read in each. A section without them has at least one of
        the `plain` ranges, and extends to the special tokens before and after it: it tokenises as if the vocabulary had
        no special tokens. White space is absorbed as by llama.cpp."""
        done, spans = 0, iter(plain)
        span = next(spans, None)
        while span:
            start, absorbs = done, False
            for found in self._special.finditer(text, done, span[0]) if self._special else ():
                start, absorbs = found.end(), found[0] in self._absorb_right
            right = None
            while span and not right:
                after, span = span[1], next(spans, None)
                right = self._special.search(text, after, span[0] if span else len(text)) if self._special else None
            end = right.start() if right else len(text)
            if start > done:
                yield text[done:start], True
            section = text[start:end]
            section = section.lstrip(_SPACES) if absorbs else section
            yield (section.rstrip(_SPACES) if right and right[0] in self._absorb_left else section), False
            done = end
        if done < len(text) or not plain:
            yield text[done:], True

    def split(self, text: str) -> Iterator[str]:
        """The parts of a text, in order. A short text is one part."""
        start = 0
        while len(text) - start > 2 * _MIN_PART_CHARACTERS and (
            cut := self._next_cut(text, start + _MIN_PART_CHARACTERS)
        ):
            yield text[start:cut]
            start = cut
        yield text[start:]

    def _next_cut(self, text: str, after: int) -> int | None:
        """The start of the next special token that does not overlap another one."""
        while self._cut and (found := self._cut.search(text, after)):
            if not self._is_inside_special(text, found.start()):
                return found.start()
            after = found.start() + 1
        return None

    def _is_inside_special(self, text: str, cut: int) -> bool:
        """Whether a special token starts before the cut and ends after it: llama.cpp might find that one first."""
        begins = range(max(0, cut - self._longest + 1), cut)
        found = (self._special.match(text, begin) for begin in begins) if self._special else ()
        return any(match and match.end() > cut for match in found)


def split_long_runs(text: str) -> Iterator[str]:
    """Splits a text so that no part contains a run of more than about 4,000 non-space, or space, characters."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        for cut in range(run.start() + _MAX_RUN_CHARACTERS, run.end() + 1, _MAX_RUN_CHARACTERS):
            yield text[start:cut]
            start = cut
    if start < len(text) or not start:
        yield text[start:]
