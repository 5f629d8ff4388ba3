"""The part of a vocabulary that the engine uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IsCancelled = Callable[[], bool]


def never_cancelled() -> bool:
    """For requests that nobody cancels while they are prepared."""
    return False


class Vocabulary(Protocol):
    """`cppbatch.llama.Vocab`, or what tests put in its place."""

    n_tokens: int
    eog: frozenset[int]
    suppressed: frozenset[int]
    """Tokens that the model's file says must never come."""
    longest_piece: int
    """Bytes of text that one token stands for at most."""

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        cancelled: IsCancelled = never_cancelled,
    ) -> npt.NDArray[np.int32]:
        """The ids of a text, int32[n], with BOS where the model wants it, and control tokens read as such.

        `cancelled` is asked now and then while that takes long. Raises `RequestCancelled`.
        """
        ...

    def tokenize_pair(self, query: str, document: str) -> npt.NDArray[np.int32]:
        """The ids of two texts as a reranker reads them, int32[n]."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """A token's bytes; `special`: control tokens too."""
        ...

    def dry_sampler(
        self, *, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: tuple[str, ...]
    ) -> Any:
        """A `cppbatch.llama.DrySampler` to clone."""
        ...

    def for_grammars(self) -> Any:
        """The vocabulary as llguidance wants it, an `LLTokenizer`. Slow: once for each engine."""
        ...
