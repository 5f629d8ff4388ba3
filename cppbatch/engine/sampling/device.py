"""Rows of which the device has sent the likeliest tokens only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling.choice import Choice, at_fault, choose_greedily, choose_randomly, nothing_left
from cppbatch.engine.sampling.draw import IMPOSSIBLE
from cppbatch.engine.sampling.edits import apply_bans_and_biases, apply_penalties
from cppbatch.engine.sampling.recipe import Kind
from cppbatch.engine.sequence import Sequence


def sample_candidates(
    sequences: list[Sequence], ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float32]
) -> list[Choice]:
    """A choice for each row: token ids, rising, and their logits, each [n, n_candidates].

    The token is the one that the whole row would have given: there are as many candidates as the recipe needs.
    """
    for sequence, of_row, row in zip(sequences, ids, logits, strict=True):
        apply_bans_and_biases(sequence, row, of_row)
        if sequence.params.has_penalties:
            apply_penalties(sequence, row, of_row)
    places = [IMPOSSIBLE] * len(sequences)
    drawn = [i for i, sequence in enumerate(sequences) if sequence.recipe.kind is Kind.DRAW]
    for i in set(range(len(sequences))).difference(drawn):
        places[i] = choose_greedily(logits[i])
    if drawn:
        for i, place in zip(drawn, choose_randomly(sequences, drawn, logits, ids), strict=True):
            places[i] = place
    return [
        Choice(int(ids[i, place]))
        if place != IMPOSSIBLE
        else Choice(IMPOSSIBLE, None, nothing_left(logits[i]), at_fault(sequences[i], logits[i]))
        for i, place in enumerate(places)
    ]
