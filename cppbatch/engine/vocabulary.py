"""The part of a vocabulary that the engine uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IsCancelled = Callable[[], bool]


def never_cancelled() -> bool:
    """For requests that cannot be cancelled while they are prepared."""
    return False


class Vocabulary(Protocol):
    """`cppbatch.llama.Vocab`, or a fake in tests."""

    n_tokens: int
    eog: frozenset[int]
    markers: npt.NDArray[np.bool_]
    """Which tokens only a chat template writes, bool[n_tokens]."""
    suppressed: frozenset[int]
    """Tokens that must never be generated, by the model's file."""
    adds_bos: bool
    """Whether texts begin with BOS."""
    longest_piece: int
    """The number of bytes of the longest token."""

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        cancelled: IsCancelled = never_cancelled,
    ) -> npt.NDArray[np.int32]:
        """The token ids of a text, int32[n].

        `add_special`: begin with BOS if the model wants it. `parse_special`: the text may contain control tokens.
        `cancelled`: called now and then; when it returns True, this raises `RequestCancelled`.
        """
        ...

    def tokenize_pair(self, query: str, document: str) -> npt.NDArray[np.int32]:
        """The token ids of a pair of texts for a reranker, int32[n]."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token. Those of a control token are empty, unless `special`."""
        ...

    def dry_sampler(
        self, *, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: tuple[str, ...]
    ) -> Any:
        """A `cppbatch.llama.DrySampler`, which is cloned for each sequence."""
        ...

    def for_grammars(self) -> Any:
        """An `LLTokenizer` for llguidance. Slow: called once for each engine."""
        ...
