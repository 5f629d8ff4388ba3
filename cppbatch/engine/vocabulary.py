"""The part of a vocabulary that the engine uses, and the detokenizer, which converts token bytes to text."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IsCancelled = Callable[[], bool]


def never_cancelled() -> bool:
    """For requests that cannot be cancelled during preparation."""
    return False


class Vocabulary(Protocol):
    """`cppbatch.llama.Vocab`, or a fake in tests."""

    n_tokens: int
    eog: frozenset[int]
    control_texts: tuple[str, ...]
    """The texts of the control tokens."""
    markers: npt.NDArray[np.bool_]
    """Which tokens are only written by chat templates, bool[n_tokens]."""
    suppressed: frozenset[int]
    """Tokens that must never be generated, according to the model's file."""
    adds_bos: bool
    """Whether texts start with BOS."""
    longest_piece: int
    """The number of bytes of the longest token."""

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = True,
        add_eos: bool = True,
        parse_special: bool = True,
        plain: Sequence[tuple[int, int]] = (),
        cancelled: IsCancelled = never_cancelled,
    ) -> npt.NDArray[np.int32]:
        """The token ids of a text, int32[n].

        `add_special`: start with BOS if the model uses it, and with `add_eos` end with EOS. `parse_special`: the text
        may contain control tokens, except in the `plain` ranges of its characters. `cancelled`: polled; if it returns
        True, this raises `RequestCancelled`.
        """
        ...

    def tokenize_pair(self, query: str, document: str) -> npt.NDArray[np.int32]:
        """The token ids of a pair of texts for a reranker, int32[n]."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; empty for a control token, unless `special`."""
        ...

    def dry_sampler(
        self, *, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: tuple[str, ...]
    ) -> Any:
        """A `cppbatch.llama.DrySampler`, to be cloned for each sequence."""
        ...

    def for_grammars(self) -> Any:
        """An `LLTokenizer` for llguidance. Slow: called once per engine. Raises `ValueError` without an end token."""
        ...


class Detokenizer:
    """Assembles the text of one completion.

    `push` returns final text. It holds back incomplete UTF-8 characters, and text that could start a stop string.
    Example with the stop string "END": after "the E" it returns "the " and holds back "E"; after "N" it returns "";
    after "G" it returns "ENG". With "D" instead of "G" it returns "", and `stopped` is True.

    All text after a stop string is dropped. The time per character depends on the number of different lengths of the
    stop strings, hardly on their number.
    """

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._stop = frozenset(stop)
        self._lengths = sorted({len(string) for string in stop}, reverse=True)
        self._sorted = sorted(stop)
        self._include_stop = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop: str | None = None
        """The stop string found."""
        self.n_characters = 0
        """Complete characters so far, whether returned, held back or dropped."""
        self.completed = ""
        """The characters completed by the last `push` or `flush`, whether returned, held back or dropped."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop is not None

    def push(self, piece: bytes) -> str:
        """Adds the bytes of a token. Returns the new final text."""
        self.completed = self._decoder.decode(piece)
        return "" if self.stopped else self._release(self.completed)

    def flush(self) -> str:
        """The held-back text, at the end of a completion; "" after a stop string."""
        self.completed = self._decoder.decode(b"", final=True)
        if self.stopped:
            return ""
        text = self._release(self.completed)
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str) -> str:
        self.n_characters += len(new)
        if not self._stop or not new:
            return new
        text = self._held + new
        if found := self._first_stop(text, len(self._held)):
            end, self.stop = found
            self._held = ""
            return text[:end] if self._include_stop else text[: end - len(self.stop)]
        start = self._possible_start(text)
        self._held = text[start:]
        return text[:start]

    def _first_stop(self, text: str, n_old: int) -> tuple[int, str] | None:
        """The first stop string in `text` and the index where it ends.

        The first is the stop string whose last character comes first in the text; of two that end at the same
        character, the longer one. The first `n_old` characters were searched before and contain no end of a stop
        string.
        """
        for end in range(n_old + 1, len(text) + 1):
            for length in self._lengths:
                if length <= end and (string := text[end - length : end]) in self._stop:
                    return end, string
        return None

    def _possible_start(self, text: str) -> int:
        """The start of the longest suffix of `text` that is a prefix of a stop string; `len(text)` if there is none."""
        longest = self._lengths[0] - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if self._is_beginning(text[start:]):
                return start
        return len(text)

    def _is_beginning(self, text: str) -> bool:
        """Whether a stop string starts with `text`. In the sorted list, these follow the insertion point of `text`."""
        i = bisect_left(self._sorted, text)
        return i < len(self._sorted) and self._sorted[i].startswith(text)
