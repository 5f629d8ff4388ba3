"""Rows of logits to tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sequence import SamplerState, Sequence
from cppbatch.errors import LlamaError
from cppbatch.llama import SamplerChain

FAILED = -1
"""In place of a token: no token could be sampled, and the sequence's `error` says why."""


class Sampler:
    """Samples a token for each sequence of a step. Greedy rows in numpy, the others by llama.cpp's chains."""

    def __init__(self, n_vocab: int, eog: frozenset[int]) -> None:
        self._n_vocab = n_vocab
        self._eog = sorted(eog)

    def sample(self, sequences: list[Sequence], logits: npt.NDArray[np.float32]) -> list[int]:
        """A token for each row of `logits`, float32[len(sequences), n_vocab]; rows may be changed in place."""
        return [self._sample_row(sequence, row) for sequence, row in zip(sequences, logits, strict=True)]

    def _sample_row(self, sequence: Sequence, row: npt.NDArray[np.float32]) -> int:
        too_short = sequence.n_generated < sequence.params.min_tokens
        if too_short or sequence.params.ignore_eos:
            row[self._eog] = -np.inf
        if too_short:
            row[list(sequence.params.stop_token_ids)] = -np.inf
        try:
            if sequence.params.is_greedy and not sequence.params.has_penalties:
                return _greedy(row)
            if sequence.sampler is None:
                sequence.sampler = self._chain(sequence)
            return sequence.sampler.sample(row)
        except LlamaError as error:
            sequence.error = str(error)
            return FAILED

    def _chain(self, sequence: Sequence) -> SamplerState:
        """The sequence's chain, in llama.cpp's default order, knowing the tokens so far."""
        params = sequence.params
        chain = SamplerChain(self._n_vocab)
        if params.has_penalties:
            last_n = min(params.penalty_last_n, len(sequence.tokens))  # llama.cpp allocates the whole window
            chain.penalties(last_n, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if params.is_greedy:
            chain.greedy()
        else:
            if params.top_k:
                chain.top_k(params.top_k)
            if params.top_p < 1:
                chain.top_p(params.top_p)
            if params.min_p:
                chain.min_p(params.min_p)
            chain.temperature(params.temperature).dist(sequence.seed)
        if params.has_penalties:
            for token in sequence.tokens[max(0, sequence.n_tokens - params.penalty_last_n) : sequence.n_tokens]:
                chain.accept(int(token))
        return chain


def _greedy(row: npt.NDArray[np.float32]) -> int:
    token = int(row.argmax())  # of the NaN, if there is one
    if not np.isfinite(row[token]):
        raise LlamaError(f"no token can be sampled: the largest logit of this row is {row[token]}")
    return token
