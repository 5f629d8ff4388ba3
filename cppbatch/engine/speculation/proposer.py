"""The interface of a source of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sequence import Seq


class Draft(NamedTuple):
    """Tokens that may be the next ones of a sequence."""

    tokens: npt.NDArray[np.int32]
    """int32[k], k >= 1: the first one would be at position `sequence.n_tokens`."""
    probabilities: npt.NDArray[np.float64]
    """float64[k]: the estimated probability that each token is accepted if those before it are."""


class Proposer(Protocol):
    """Drafts the next tokens of sequences. Called on the engine's thread, between two steps."""

    costs_compute: bool
    """Whether it is a `ModelProposer`. Otherwise `propose` is called in every step, also to learn what would have been
    accepted."""

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        """For each sequence a draft of at most `most` tokens, or None.

        The sequences decode: `tokens[:n_tokens]` is known, and only its last token is pending.
        """
        ...

    def finished(self, sequence: Seq) -> None:
        """The sequence has ended: its tokens do not change any more."""
        ...

    def close(self) -> None:
        """Frees what the proposer holds."""
        ...


class ModelProposer(Proposer, Protocol):
    """A proposer that computes with a model: it is only called when its drafts are worth their time."""

    token_s: float
    """What a token takes without drafts; set before each call of `propose`. 0: not known."""

    def serves(self, sequence: Seq) -> bool:
        """Whether it can draft for this sequence now."""
        ...

    def seconds(self, n_sequences: int, k: int) -> float:
        """How long drafts of `k` tokens for each of `n_sequences` take, if no prompt has to be read; 0 before any time
        is known."""
        ...

    def read_seconds(self, sequence: Seq) -> float:
        """How long it takes to read what the model has not read of a sequence: at first, its prompt."""
        ...
