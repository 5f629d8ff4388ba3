"""The interface of a source of drafts, and the source that reads grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.kv.radix_tree import n_common
from cppbatch.engine.sequence import Seq
from cppbatch.engine.vocabulary import Vocabulary

PRIOR_WEIGHT = 8.0
"""Before any draft is verified, an acceptance rate counts as if observed in this many draft tokens."""
MOST_PROBABLE = 0.99
"""The maximum probability of a token, so that longer drafts are worth less and less."""


class Draft(NamedTuple):
    """Tokens that may be the next ones of a sequence."""

    tokens: npt.NDArray[np.int32]
    """int32[k], k >= 1; the first one is for position `sequence.n_tokens`."""
    probabilities: npt.NDArray[np.float64]
    """float64[k]: the estimated probability that each token is accepted if the preceding ones are."""


class Proposer(Protocol):
    """Drafts the next tokens of sequences. Called on the engine's thread, between two steps."""

    costs_compute: bool
    """Whether it is a `ModelProposer`. Otherwise `propose` is called in every step, also to learn which drafts would
    have been accepted."""

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        """For each sequence, a draft of up to `most` tokens, or None.

        The sequences decode: `tokens[:n_tokens]` is known, and only its last token is pending.
        """
        ...

    def finished(self, sequence: Seq) -> None:
        """Called when the sequence has ended: its tokens are final."""
        ...

    def close(self) -> None:
        """Frees the proposer's resources."""
        ...


class ModelProposer(Proposer, Protocol):
    """A proposer that runs a model, and is only called if its drafts are worth their time."""

    token_s: float
    """Seconds per token without drafts; set before each step. 0: unknown."""

    def serves(self, sequence: Seq) -> bool:
        """Whether it can currently draft for this sequence."""
        ...

    def seconds(self, n_sequences: int, k: int) -> float:
        """How long drafts of `k` tokens for each of `n_sequences` take, if no prompt has to be read; 0 before any time
        is known."""
        ...

    def read_seconds(self, sequence: Seq) -> float:
        """The time to read the unread part of a sequence: at first, its prompt."""
        ...


# Drafts the text that a grammar forces.
#
# Example: after `{"name": "Ada", ` a JSON schema allows only `"born_in": "`. These bytes are tokenised and drafted. The
# model may write them with other tokens, so they are verified like any draft.


class GrammarProposer:
    """Drafts the bytes forced by a grammar. Learns how often the model writes them with these tokens."""

    costs_compute = False

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._acceptance = 0.8  # before any draft
        self._drafted: dict[Seq, tuple[int, Draft]] = {}  # the last draft, with its position

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        """See `Proposer`."""
        return [self._draft(sequence, n) for sequence, n in zip(sequences, most, strict=True)]

    def _draft(self, sequence: Seq, most: int) -> Draft | None:
        if sequence.constraint is None:
            return None
        self._learn(sequence)
        text = sequence.constraint.forced_text() if most > 0 else ""
        if not text:
            return None
        tokens = self._vocab.tokenize(text, add_special=False, parse_special=False)
        draft = Draft(tokens[:most], np.full(min(len(tokens), most), self._acceptance))
        self._drafted[sequence] = sequence.n_tokens, draft
        return draft

    def _learn(self, sequence: Seq) -> None:
        if sequence not in self._drafted:
            return
        start, draft = self._drafted.pop(sequence)
        known = sequence.tokens[start : sequence.n_tokens]
        n = n_common(draft.tokens, known)
        for is_right in [True] * n + [False] * (n < min(len(draft.tokens), len(known))):
            self._acceptance += 0.1 * (is_right - self._acceptance)  # a mean of about ten tokens

    def finished(self, sequence: Seq) -> None:
        """See `Proposer`."""
        self._drafted.pop(sequence, None)

    def close(self) -> None:
        """See `Proposer`."""
        self._drafted.clear()
