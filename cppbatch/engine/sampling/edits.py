"""Changes to a row of logits, in place: bans, biases, penalties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.sequence import Sequence

Row = npt.NDArray[np.float32]


def apply_bans_and_biases(sequence: Sequence, row: Row) -> None:
    """What the recipe says may not come, and what it favours."""
    recipe = sequence.recipe
    if recipe.bias_ids.size:
        row[recipe.bias_ids] += recipe.bias
    if recipe.never.size:
        row[recipe.never] = -np.inf
    if recipe.not_yet.size and sequence.n_generated < sequence.params.min_tokens:
        row[recipe.not_yet] = -np.inf


def apply_penalties(sequence: Sequence, row: Row) -> None:
    """Lowers the logits of recent tokens as llama.cpp does (arXiv:1909.05858, but multiplying negative logits)."""
    params = sequence.params
    ids, counts = np.unique(recent(sequence, params.penalty_last_n), return_counts=True)
    values = row[ids]
    repetition = np.float32(params.repetition_penalty)
    values = np.where(values <= 0, values * repetition, values / repetition)
    row[ids] = values - (counts * params.frequency_penalty + params.presence_penalty)


def recent(sequence: Sequence, last_n: int) -> npt.NDArray[np.int32]:
    """The last tokens, prompt included; all of them for -1."""
    start = max(0, sequence.n_tokens - last_n) if last_n >= 0 else 0
    return sequence.tokens[start : sequence.n_tokens]


def window(params: SamplingParams) -> int:
    """How many of the last tokens any sampler looks at; -1: all."""
    wanted = [params.penalty_last_n, params.dry_penalty_last_n]
    return -1 if -1 in wanted else max(wanted)
