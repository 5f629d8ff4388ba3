"""Rows of which the device has sent the likeliest tokens only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling.logit_processing import apply_bans_and_biases, apply_penalties
from cppbatch.engine.sampling.random_sampling import IMPOSSIBLE
from cppbatch.engine.sampling.sampler_output import (
    SamplerOutput,
    at_fault,
    choose_greedily,
    choose_randomly,
    nothing_left,
)
from cppbatch.engine.sampling.sampling_plan import Kind
from cppbatch.engine.sequence import Seq


def sample_candidates(
    sequences: list[Seq], ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float32]
) -> list[SamplerOutput]:
    """A choice for each row: token ids, rising, and their logits, each [n, n_candidates].

    The token is the one that the whole row would have given: there are as many candidates as the recipe needs.
    """
    for sequence, of_row, row in zip(sequences, ids, logits, strict=True):
        apply_bans_and_biases(sequence, row, of_row)
        if sequence.params.has_penalties:
            apply_penalties(sequence, row, of_row)
    places = [IMPOSSIBLE] * len(sequences)
    drawn = [i for i, sequence in enumerate(sequences) if sequence.sampling.kind is Kind.DRAW]
    for i in set(range(len(sequences))).difference(drawn):
        places[i] = choose_greedily(logits[i])
    if drawn:
        for i, place in zip(drawn, choose_randomly(sequences, drawn, logits, ids), strict=True):
            places[i] = place
    return [
        SamplerOutput(int(ids[i, place]))
        if place != IMPOSSIBLE
        else SamplerOutput(IMPOSSIBLE, None, nothing_left(logits[i]), at_fault(sequences[i], logits[i]))
        for i, place in enumerate(places)
    ]
