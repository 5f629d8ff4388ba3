"""Log-probabilities of the tokens taken, for the rows that ask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cppbatch.engine.request import TokenLogprob
from cppbatch.engine.sequence import Seq
from cppbatch.engine.vocabulary import Vocabulary

Row = npt.NDArray[np.float32]
Rows = npt.NDArray[np.float32]


class Likelihoods:
    """The model's own log-probabilities of one row, before anything changes it: log softmax, summed in float64."""

    def __init__(self, row: Row, n_top: int) -> None:
        self._row = row.copy()
        peak = float(row.max())
        self._log_mass = peak + float(np.log(np.exp(row - np.float32(peak)).sum(dtype=np.float64)))
        likeliest = np.argpartition(-row, n_top)[:n_top] if 0 < n_top < len(row) else np.arange(0)
        self._top = likeliest[np.argsort(-row[likeliest], kind="stable")]

    def of(self, token: int) -> float:
        """A token's log-probability."""
        return float(self._row[token]) - self._log_mass

    def top(self) -> list[tuple[int, float]]:
        """The likeliest tokens with theirs, the likeliest first."""
        return [(token, self.of(token)) for token in self._top.tolist()]


def describe(likelihoods: Likelihoods | None, token: int, sequence: Seq, vocab: Vocabulary) -> TokenLogprob:
    """A token as it is reported; None for the prompt's first, of which the model says nothing."""

    def piece(other: int) -> bytes:
        return vocab.piece(other, special=True)

    return TokenLogprob(
        token=token,
        piece=piece(token),
        logprob=likelihoods.of(token) if likelihoods else None,
        top=[(other, piece(other), logprob) for other, logprob in likelihoods.top()] if likelihoods else [],
    )


class PromptScorer:
    """Takes the log-probabilities of prompts, for requests with `echo`, out of the logits of a step."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab

    def take(self, chunks: Sequence[tuple[Seq, int]], logits: Rows) -> None:
        """Scores what was computed of prompts. `logits`: all rows of the step, as `Seq.n_logits` has them."""
        at = 0
        for sequence, n in chunks:
            rows = logits[at : at + sequence.n_logits(n)]
            at += len(rows)
            if sequence.is_scored:
                self._score(sequence, rows)

    def _score(self, sequence: Seq, rows: Rows) -> None:
        """The row after token i tells of token i + 1; those known already, from before a preemption, are passed."""
        scores, tokens = sequence.prompt_logprobs, sequence.tokens
        if not scores:
            scores.append(describe(None, int(tokens[0]), sequence, self._vocab))
        for i, row in enumerate(rows, sequence.n_computed + 1):
            if i == len(scores) and i < sequence.n_prompt:
                likelihoods = Likelihoods(row, sequence.params.logprobs or 0)
                scores.append(describe(likelihoods, int(tokens[i]), sequence, self._vocab))
