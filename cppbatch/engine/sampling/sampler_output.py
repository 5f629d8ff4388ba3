"""Who chooses among the logits that are left: numpy, for many rows at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cppbatch.engine.request import TokenLogprob
from cppbatch.engine.sampling.random_sampling import IMPOSSIBLE, draw
from cppbatch.engine.sampling.randomness import UInt64, bits
from cppbatch.engine.sequence import Seq

Rows = npt.NDArray[np.float32]
Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class SamplerOutput(NamedTuple):
    """What came of a row: a token, or why there is none. Or of a whole sequence: its vector."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None
    error_field: str | None = None
    """The request's field that is to blame for the error, if one is."""
    embedding: bytes | None = None
    """As in `GenerationEvent`."""


def nothing_left(row: Row) -> str:
    """Why no token of this row can be chosen."""
    return f"no token can be sampled: the largest logit of this row is {row.max()}"


def at_fault(sequence: Seq, row: Row) -> str | None:
    """Which of the request's fields is why this row gave no token; None: the logits themselves, or llama.cpp."""
    params = sequence.params
    if params.logits_processor is not None:
        return "logits_processor"
    if sequence.constraint and sequence.constraint.error:
        return params.grammar_field
    if row.max() != -np.inf:  # NaN
        return None
    if params.suppress_tokens:
        return "suppress_tokens"
    return params.grammar_field or ("stop_token_ids" if params.stop_token_ids else None)


def choose_the_largest(sequences: list[Seq], logits: Rows) -> list[SamplerOutput] | None:
    """The quick way, for sequences that are all greedy and nothing more. None where it does not do for one of them.

    A step leaves hardly any of our code in the CPU's caches, and then each line of it costs microseconds.
    """
    if any(sequence.sampling.lowered is None for sequence in sequences):
        return None
    tokens = logits.argmax(axis=1)
    is_lowered = any(token in s.sampling.lowered for s, token in zip(sequences, tokens.tolist(), strict=True))  # type: ignore[operator]
    if is_lowered or not np.isfinite(logits[np.arange(len(tokens)), tokens]).all():
        return None
    return [SamplerOutput(token) for token in tokens.tolist()]


def choose_greedily(row: Row) -> int:
    """Where the largest logit is; `IMPOSSIBLE` if that is no number."""
    place = int(row.argmax())  # of the NaN, if there is one
    return place if np.isfinite(row[place]) else IMPOSSIBLE


def choose_randomly(sequences: list[Seq], rows: list[int], logits: Rows, ids: Ids | None = None) -> list[int]:
    """Where in their rows the filters and seeds of these sequences draw; `IMPOSSIBLE` where nothing can be.

    `ids`: the tokens of the rows' places, where they are not the whole vocabulary.
    """
    filters = [sequences[i].sampling.filters for i in rows]
    everybody = len(rows) == len(logits)
    theirs = None if ids is None else ids if everybody else ids[rows]
    places = draw(logits if everybody else logits[rows], filters, keys_of(sequences, rows), theirs)
    result: list[int] = places.tolist()
    return result


def keys_of(sequences: list[Seq], rows: list[int]) -> UInt64:
    """64 random bits for the next token of each of these."""
    seeds = np.array([sequences[i].seed for i in rows], np.uint64)
    return bits(seeds, np.array([sequences[i].n_generated for i in rows], np.uint64))
