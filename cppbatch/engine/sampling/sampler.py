"""A token for every row of a step: who changes the logits, in which order, and who chooses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cppbatch.engine.request import TokenLogprob
from cppbatch.engine.sampling.chains import Chains
from cppbatch.engine.sampling.draw import IMPOSSIBLE, draw
from cppbatch.engine.sampling.edits import apply_bans_and_biases, apply_penalties
from cppbatch.engine.sampling.grammar import Masks
from cppbatch.engine.sampling.logprobs import Likelihoods, describe
from cppbatch.engine.sampling.processors import run_processors
from cppbatch.engine.sampling.randomness import bits, uniform
from cppbatch.engine.sampling.recipe import Kind
from cppbatch.engine.sequence import Sequence
from cppbatch.engine.vocabulary import Tokens
from cppbatch.errors import LlamaError

Rows = npt.NDArray[np.float32]
Row = npt.NDArray[np.float32]


class Choice(NamedTuple):
    """What came of a row: a token, or why there is none."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler:
    """Samples a token for each sequence of a step.

    In this order: the log-probabilities that are asked for, the request's own `logits_processor`, bans and biases, the
    grammar, then penalties, filters and the draw: in numpy for the whole batch where it can (docs/architecture.md), by
    llama.cpp's chains otherwise.
    """

    def __init__(self, vocab: Tokens) -> None:
        self._vocab = vocab
        self._masks = Masks(vocab.n_tokens)
        self._chains = Chains(vocab.n_tokens)

    def sample(self, sequences: list[Sequence], logits: Rows) -> list[Choice]:
        """A choice for each row of `logits`, float32[len(sequences), n_vocab], which are changed in place."""
        likelihoods = {
            i: Likelihoods(logits[i], sequence.params.logprobs)
            for i, sequence in enumerate(sequences)
            if sequence.params.logprobs is not None
        }
        errors = run_processors(sequences, logits)
        for sequence, row in zip(sequences, logits, strict=True):
            apply_bans_and_biases(sequence, row)
        constrained = [(s.constraint, row) for s, row in zip(sequences, logits, strict=True) if s.constraint]
        if constrained:
            self._masks.apply(constrained)
        tokens = [IMPOSSIBLE] * len(sequences)
        self._choose(sequences, logits, tokens, errors)
        return [self._choice(i, sequences[i], tokens[i], errors.get(i), likelihoods.get(i)) for i in range(len(tokens))]

    def _choose(self, sequences: list[Sequence], logits: Rows, tokens: list[int], errors: dict[int, str]) -> None:
        """Fills in `tokens`, and `errors` where there is none."""
        rows: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        for i, sequence in enumerate(sequences):
            if i in errors:
                continue
            rows[sequence.recipe.kind].append(i)
            if sequence.params.has_penalties and sequence.recipe.kind is not Kind.CHAIN:
                apply_penalties(sequence, logits[i])
        results: list[int | LlamaError] = [_greedy(logits[i]) for i in rows[Kind.GREEDY]]
        results += _draw(sequences, logits, rows[Kind.DRAW]) if rows[Kind.DRAW] else []
        results += self._chain(sequences, logits, rows[Kind.CHAIN]) if rows[Kind.CHAIN] else []
        for i, result in zip([*rows[Kind.GREEDY], *rows[Kind.DRAW], *rows[Kind.CHAIN]], results, strict=True):
            if isinstance(result, LlamaError):
                errors[i] = str(result)
            elif result == IMPOSSIBLE:
                errors[i] = f"no token can be sampled: the largest logit of this row is {logits[i].max()}"
            else:
                tokens[i] = result

    def _chain(self, sequences: list[Sequence], logits: Rows, rows: list[int]) -> list[int | LlamaError]:
        seeds = bits(*_seeds_and_positions(sequences, rows)) >> np.uint64(32)
        return self._chains.sample([(sequences[i], logits[i], int(seed)) for i, seed in zip(rows, seeds, strict=True)])

    def _choice(
        self, i: int, sequence: Sequence, token: int, error: str | None, likelihoods: Likelihoods | None
    ) -> Choice:
        if error is not None or likelihoods is None:
            return Choice(token, None, error)
        return Choice(token, describe(likelihoods, token, sequence, self._vocab))

    def close(self) -> None:
        """Ends the threads."""
        self._chains.close()


def _greedy(row: Row) -> int:
    token = int(row.argmax())  # of the NaN, if there is one
    return token if np.isfinite(row[token]) else IMPOSSIBLE


def _draw(sequences: list[Sequence], logits: Rows, rows: list[int]) -> list[int]:
    filters = [sequences[i].recipe.filters for i in rows]
    theirs = logits if len(rows) == len(logits) else logits[rows]
    tokens: list[int] = draw(theirs, filters, uniform(*_seeds_and_positions(sequences, rows))).tolist()
    return tokens


def _seeds_and_positions(
    sequences: list[Sequence], rows: list[int]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    return (
        np.array([sequences[i].seed for i in rows], np.uint64),
        np.array([sequences[i].n_generated for i in rows], np.uint64),
    )
