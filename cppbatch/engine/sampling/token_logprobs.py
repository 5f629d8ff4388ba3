"""Log-probabilities of sampled tokens and of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.kv.batch_order import BatchEntry
from cppbatch.engine.request import TokenLogprob
from cppbatch.engine.sequence import Seq
from cppbatch.engine.vocabulary import Vocabulary

Row = npt.NDArray[np.float32]
Logits = npt.NDArray[np.float32]


class Logprobs(Protocol):
    """The log-probabilities of a row's tokens."""

    def of(self, token: int) -> float: ...
    def top(self) -> list[tuple[int, float]]: ...


class RowLogprobs:
    """The model's log-probabilities for a row of logits: its log softmax, summed in float64.

    Created before any processing changes the row; keeps a copy of it.
    """

    def __init__(self, row: Row, n_top: int) -> None:
        self._row = row.copy()
        maximum = float(row.max())
        self._log_sum = maximum + float(np.log(np.exp(row - np.float32(maximum)).sum(dtype=np.float64)))
        likeliest = np.argpartition(-row, n_top)[:n_top] if 0 < n_top < len(row) else np.arange(0)
        self._top = likeliest[np.argsort(-row[likeliest], kind="stable")]

    def of(self, token: int) -> float:
        """The log-probability of a token."""
        return float(self._row[token]) - self._log_sum

    def top(self) -> list[tuple[int, float]]:
        """The `n_top` most likely tokens with their log-probabilities, most likely first."""
        return [(token, self.of(token)) for token in self._top.tolist()]


class PostSamplingLogprobs:
    """The log-probabilities after the samplers: the log softmax of the remaining logits.

    `ids`, int64[n]: the remaining tokens; `logits`, float64[n]: their logits after temperature.
    """

    def __init__(self, ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float64], n_top: int) -> None:
        below = logits - logits.max()
        logprobs = below - np.log(np.exp(below).sum())
        self._logprobs: dict[int, float] = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
        likeliest = np.argsort(-below, kind="stable")[:n_top]
        self._top: list[int] = ids[likeliest[np.exp(logprobs[likeliest]) > 0]].tolist()

    def of(self, token: int) -> float:
        """The log-probability of a remaining token."""
        return self._logprobs[token]

    def top(self) -> list[tuple[int, float]]:
        """The most likely tokens with their log-probabilities, without those of probability 0."""
        return [(token, self.of(token)) for token in self._top]


def make_token_logprob(row_logprobs: Logprobs | None, token: int, sequence: Seq, vocab: Vocabulary) -> TokenLogprob:
    """The report for a token. `row_logprobs`: None for the first token of a prompt, which has no logits."""

    def piece(other: int) -> bytes:
        return vocab.piece(other, special=True)

    return TokenLogprob(
        token=token,
        piece=piece(token),
        logprob=row_logprobs.of(token) if row_logprobs else None,
        top=[(other, piece(other), logprob) for other, logprob in row_logprobs.top()] if row_logprobs else [],
    )


class PromptScorer:
    """Computes the log-probabilities of prompt tokens, for requests with `echo`."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab

    def score(self, batch: Sequence[BatchEntry], logits: Logits) -> None:
        """Appends a step's results to `Seq.prompt_logprobs`. `logits`: all rows of the step, in batch order."""
        start = 0
        for entry, n in batch:
            rows = logits[start : start + entry.n_logits(n)]
            start += len(rows)
            if isinstance(entry, Seq) and entry.is_scored:
                self._score_rows(entry, rows)

    def _score_rows(self, sequence: Seq, rows: Logits) -> None:
        """The row of token i scores token i + 1. Skips tokens that were scored before a preemption."""
        scores, tokens = sequence.prompt_logprobs, sequence.tokens
        if not scores:
            scores.append(make_token_logprob(None, int(tokens[0]), sequence, self._vocab))
        for i, row in enumerate(rows, sequence.n_computed + 1):
            if i == len(scores) and i < sequence.n_prompt:
                row_logprobs = RowLogprobs(row, sequence.params.logprobs or 0)
                scores.append(make_token_logprob(row_logprobs, int(tokens[i]), sequence, self._vocab))
