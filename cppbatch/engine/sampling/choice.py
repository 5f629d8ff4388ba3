"""Who chooses among the logits that are left: numpy, for many rows at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cppbatch.engine.request import TokenLogprob
from cppbatch.engine.sampling.draw import IMPOSSIBLE, draw
from cppbatch.engine.sampling.randomness import uniform
from cppbatch.engine.sequence import Sequence

Rows = npt.NDArray[np.float32]
Row = npt.NDArray[np.float32]


class Choice(NamedTuple):
    """What came of a row: a token, or why there is none."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


def nothing_left(row: Row) -> str:
    """Why no token of this row can be chosen."""
    return f"no token can be sampled: the largest logit of this row is {row.max()}"


def choose_greedily(row: Row) -> int:
    """Where the largest logit is; `IMPOSSIBLE` if that is no number."""
    place = int(row.argmax())  # of the NaN, if there is one
    return place if np.isfinite(row[place]) else IMPOSSIBLE


def choose_randomly(sequences: list[Sequence], rows: list[int], logits: Rows) -> list[int]:
    """Where in their rows the filters and seeds of these sequences draw; `IMPOSSIBLE` where nothing can be."""
    filters = [sequences[i].recipe.filters for i in rows]
    theirs = logits if len(rows) == len(logits) else logits[rows]
    places: list[int] = draw(theirs, filters, uniform(*seeds_and_positions(sequences, rows))).tolist()
    return places


def seeds_and_positions(
    sequences: list[Sequence], rows: list[int]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """What decides the random numbers of these sequences' next tokens."""
    return (
        np.array([sequences[i].seed for i in rows], np.uint64),
        np.array([sequences[i].n_generated for i in rows], np.uint64),
    )
