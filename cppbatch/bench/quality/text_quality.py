"""How well two files of one model predict a text: perplexity, KL divergence, and how often their top tokens agree.

As in llama.cpp's llama-perplexity, the text is read in contexts of up to 512 tokens, and the second half of each is
scored, so that every scored token has a few hundred before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.llama import Batch

CONTEXT = 512
"""The most tokens of a context."""
_ROWS = 64  # tokens of a batch, so logits of large vocabularies need little memory


class Scored(Protocol):
    """The part of a context that scoring uses (`cppbatch.llama.Context`)."""

    def decode(self, batch: Batch) -> None: ...
    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]: ...
    def clear(self) -> None: ...


class TextQuality(NamedTuple):
    """The figures of two models on the same tokens."""

    n_scored: int
    """Number of tokens that were predicted."""
    source_perplexity: float
    """exp of the mean of -log p(token) of the source."""
    perplexity: float
    """The same for the other model."""
    kl_divergence: float
    """Mean over the positions of sum p (log p - log q), in nats: p of the source, q of the other model."""
    same_top: float
    """Share of the positions at which both have the same most likely token."""


def english_text() -> str:
    """A text of about 2,000 tokens: prose, dialogue, figures, a little code."""
    return files("cppbatch.bench.quality").joinpath("english.txt").read_text("utf-8")


def compare_text(
    source: Scored, others: Sequence[Scored], tokens: npt.NDArray[np.int32], bos: int | None = None
) -> list[TextQuality]:
    """Scores the tokens, int32[n], with the source and each other model. `bos`: the token before each context, None for
    no token.

    The contexts are empty afterwards. They must hold `CONTEXT` tokens and take batches of 64. Raises ValueError for
    fewer than 4 tokens, and the exceptions of the contexts.
    """
    if len(tokens) < 4:
        raise ValueError(f"{len(tokens)} tokens are not enough for a score")
    n, n_source = 0, 0.0
    n_other, kl, same = (np.zeros(len(others)) for _ in range(3))
    before = [] if bos is None else [bos]
    for part in np.array_split(tokens, math.ceil(len(tokens) / (CONTEXT - len(before)))):
        context = np.concatenate([np.asarray(before, np.int32), part])
        pieces = zip(*(_log_probs(each, context) for each in (source, *others)), strict=True)
        for (following, log_p), *of_others in pieces:
            each = np.arange(len(following))
            n += len(following)
            n_source -= float(log_p[each, following].sum(dtype=np.float64))
            for i, (_, log_q) in enumerate(of_others):
                n_other[i] -= float(log_q[each, following].sum(dtype=np.float64))
                kl[i] += float((np.exp(log_p) * (log_p - log_q)).sum(dtype=np.float64))
                same[i] += int((log_p.argmax(axis=1) == log_q.argmax(axis=1)).sum())
    perplexity = math.exp(n_source / n)
    return [
        TextQuality(n, perplexity, math.exp(of_other / n), float(k / n), float(s / n))
        for of_other, k, s in zip(n_other, kl, same, strict=True)
    ]


def _log_probs(
    context: Scored, tokens: npt.NDArray[np.int32]
) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    """Yields (the following token int32[r], log-probabilities float32[r, n_vocab]) of the second half, in pieces."""
    batch = Batch(_ROWS)
    first, stop = len(tokens) // 2, len(tokens) - 1  # positions whose logits are scored: each predicts the next token
    at = 0
    while at < stop:
        end = min(at + _ROWS, stop if at >= first else first)
        batch.clear()
        batch.add_run(tokens[at:end], at, 0, n_logits=end - at if at >= first else 0)
        context.decode(batch)
        if at >= first:
            logits = context.logits(end - at)
            shifted = logits - logits.max(axis=1, keepdims=True)
            yield tokens[at + 1 : end + 1], shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        at = end
    context.clear()
