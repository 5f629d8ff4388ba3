"""A proposer that drafts the actual text, except for some wrong tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.proposer import Draft

_WRONG_AT = 5  # every fifth token of a text is drafted wrong


class Replay:
    """Drafts the text of the last request with the same prompt, with some wrong tokens."""

    costs_compute = False

    def __init__(self) -> None:
        self._texts: list[list[int]] = []

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        return [self._draft(sequence, n) for sequence, n in zip(sequences, most, strict=True)]

    def _draft(self, sequence: Seq, most: int) -> Draft | None:
        known = sequence.tokens[: sequence.n_tokens].tolist()
        for text in self._texts:
            if text[: len(known)] == known and (following := text[len(known) :][:most]):
                wrong = [
                    token if i % _WRONG_AT else (token + 1) % 50 for i, token in enumerate(following, start=len(known))
                ]
                return Draft(np.array(wrong, np.int32), np.full(len(wrong), 0.8))
        return None

    def finished(self, sequence: Seq) -> None:
        self._texts.append(sequence.tokens[: sequence.n_tokens].tolist())

    def close(self) -> None:
        pass
