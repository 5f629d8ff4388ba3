"""Drafts what a grammar leaves no choice about.

Example: after `{"name": "Ada", ` a JSON schema allows only `"born_in": "`. These bytes are drafted as the tokens of the
text. The model may write them with other tokens, so they are verified like any draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cppbatch.engine.radix_tree import n_common
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.proposer import Draft
from cppbatch.engine.vocabulary import Vocabulary

_NEW = 0.1  # weight of a new draft token in the acceptance
_FIRST = 0.8  # acceptance before any is known


class GrammarProposer:
    """Drafts the bytes that a grammar forces. Learns how often the model writes them with these tokens."""

    costs_compute = False

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._acceptance = _FIRST
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
            self._acceptance += _NEW * (is_right - self._acceptance)

    def finished(self, sequence: Seq) -> None:
        """See `Proposer`."""
        self._drafted.pop(sequence, None)

    def close(self) -> None:
        """See `Proposer`."""
        self._drafted.clear()
