"""A token for every row of a step: who changes the logits, in which order, and who chooses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling.chain_sampling import Chains
from cppbatch.engine.sampling.logit_processing import apply_bans_and_biases, apply_penalties
from cppbatch.engine.sampling.processors import run_processors
from cppbatch.engine.sampling.random_sampling import IMPOSSIBLE
from cppbatch.engine.sampling.sampler_output import (
    SamplerOutput,
    at_fault,
    choose_greedily,
    choose_randomly,
    choose_the_largest,
    keys_of,
    nothing_left,
)
from cppbatch.engine.sampling.sampling_plan import Kind
from cppbatch.engine.sampling.structured_output import Masks
from cppbatch.engine.sampling.token_logprobs import Likelihoods, describe
from cppbatch.engine.sequence import Seq
from cppbatch.engine.vocabulary import Vocabulary
from cppbatch.errors import LlamaError

Rows = npt.NDArray[np.float32]
Row = npt.NDArray[np.float32]


class Sampler:
    """Samples a token for each sequence of a step.

    In this order: the log-probabilities that are asked for, the request's own `logits_processor`, bans and biases, the
    grammar, then penalties, filters and the draw: in numpy for the whole batch where it can (docs/architecture.md), by
    llama.cpp's chains otherwise.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._masks = Masks(vocab.n_tokens)
        self._chains = Chains(vocab.n_tokens)

    def sample(self, sequences: list[Seq], logits: Rows) -> list[SamplerOutput]:
        """A choice for each row of `logits`, float32[len(sequences), n_vocab], which are changed in place."""
        if choices := choose_the_largest(sequences, logits):
            return choices
        likelihoods = {
            i: Likelihoods(logits[i], sequence.params.logprobs)
            for i, sequence in enumerate(sequences)
            if sequence.params.logprobs is not None
        }
        errors = run_processors(sequences, logits)
        for sequence, row in zip(sequences, logits, strict=True):
            apply_bans_and_biases(sequence, row)
        self._apply_grammars(sequences, logits, errors)
        tokens = [IMPOSSIBLE] * len(sequences)
        self._choose(sequences, logits, tokens, errors)
        return [
            SamplerOutput(tokens[i], None, errors[i], at_fault(sequence, logits[i]))
            if i in errors
            else self._choice(sequence, tokens[i], likelihoods.get(i))
            for i, sequence in enumerate(sequences)
        ]

    def _apply_grammars(self, sequences: list[Seq], logits: Rows, errors: dict[int, str]) -> None:
        constrained = {i: s.constraint for i, s in enumerate(sequences) if s.constraint and i not in errors}
        if constrained:
            faults = self._masks.apply([(constraint, logits[i]) for i, constraint in constrained.items()])
            errors |= {i: fault for i, fault in zip(constrained, faults, strict=True) if fault}

    def _choose(self, sequences: list[Seq], logits: Rows, tokens: list[int], errors: dict[int, str]) -> None:
        """Fills in `tokens`, and `errors` where there is none."""
        rows: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        for i, sequence in enumerate(sequences):
            if i in errors:
                continue
            rows[sequence.sampling.kind].append(i)
            if sequence.params.has_penalties and sequence.sampling.kind is not Kind.CHAIN:
                apply_penalties(sequence, logits[i])
        results: list[int | LlamaError] = [choose_greedily(logits[i]) for i in rows[Kind.GREEDY]]
        results += choose_randomly(sequences, rows[Kind.DRAW], logits) if rows[Kind.DRAW] else []
        results += self._chain(sequences, logits, rows[Kind.CHAIN]) if rows[Kind.CHAIN] else []
        for i, result in zip([*rows[Kind.GREEDY], *rows[Kind.DRAW], *rows[Kind.CHAIN]], results, strict=True):
            if isinstance(result, LlamaError):
                errors[i] = str(result)
            elif result == IMPOSSIBLE:
                errors[i] = nothing_left(logits[i])
            else:
                tokens[i] = result

    def _chain(self, sequences: list[Seq], logits: Rows, rows: list[int]) -> list[int | LlamaError]:
        seeds = keys_of(sequences, rows) >> np.uint64(32)
        return self._chains.sample([(sequences[i], logits[i], int(seed)) for i, seed in zip(rows, seeds, strict=True)])

    def _choice(self, sequence: Seq, token: int, likelihoods: Likelihoods | None) -> SamplerOutput:
        return SamplerOutput(token, describe(likelihoods, token, sequence, self._vocab) if likelihoods else None)

    def close(self) -> None:
        """Ends the threads."""
        self._chains.close()
