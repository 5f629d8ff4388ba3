"""Changes to a row of logits, in place: bans, biases, penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.sequence import Seq

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer[Any]]


def apply_bans_and_biases(sequence: Seq, row: Row, ids: Ids | None = None) -> None:
    """What the recipe says may not come, and what it favours.

    `ids`: the row has only these tokens, rising; None: all of them.
    """
    recipe = sequence.sampling
    if recipe.bias_ids.size:
        at, known = _places(recipe.bias_ids, ids)
        row[at] += recipe.bias[known]
    if recipe.never.size:
        row[_places(recipe.never, ids)[0]] = -np.inf
    if recipe.not_yet.size and sequence.n_generated < sequence.params.min_tokens:
        row[_places(recipe.not_yet, ids)[0]] = -np.inf


def apply_penalties(sequence: Seq, row: Row, ids: Ids | None = None) -> None:
    """Lowers the logits of recent tokens as llama.cpp does (arXiv:1909.05858, but multiplying negative logits)."""
    params = sequence.params
    tokens, counts = np.unique(recent(sequence, params.penalty_last_n), return_counts=True)
    at, known = _places(tokens, ids)
    values, counts = row[at], counts[known]
    repetition = np.float32(params.repetition_penalty)
    values = np.where(values <= 0, values * repetition, values / repetition)
    row[at] = values - (counts * params.frequency_penalty + params.presence_penalty)


def _places(tokens: Ids, ids: Ids | None) -> tuple[Ids, Ids | slice]:
    """Where these tokens stand in a row of `ids`, and which of them do."""
    if ids is None:
        return tokens, slice(None)
    at = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    known = np.flatnonzero(ids[at] == tokens)
    return at[known], known


def recent(sequence: Seq, last_n: int) -> npt.NDArray[np.int32]:
    """The last tokens, prompt included; all of them for -1."""
    start = max(0, sequence.n_tokens - last_n) if last_n >= 0 else 0
    return sequence.tokens[start : sequence.n_tokens]


def window(params: SamplingParams) -> int:
    """How many of the last tokens any sampler looks at; -1: all."""
    wanted = [params.penalty_last_n, params.dry_penalty_last_n]
    return -1 if -1 in wanted else max(wanted)
