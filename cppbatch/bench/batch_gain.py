"""From how many sequences on a model gains by batches on this machine, and which types of weights gain earlier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cppbatch.errors import ModelError
from cppbatch.models.kernel_advice import earlier_gain

LEAST_GAIN = 1.2
"""Times the tokens/s of one sequence. Two measurements of one setting on a busy machine differ by nearly as much."""


def gain_notes(speeds: Mapping[int, float], model_path: str, *, n_gpu_layers: int = -1) -> list[str]:
    """Sentences for a report. `speeds`: {sequences: tokens/s of all of them together}; none without those of 1."""
    alone, sizes = speeds.get(1), sorted(speeds)
    if not alone or sizes == [1]:
        return []
    factors = ", ".join(f"{speeds[n] / alone:.2f} at B = {n}" for n in sizes[1:])
    first = gains_from(speeds)
    begins = (
        f"batching is faster here from B = {first} on"
        if first
        else (f"no batch size reaches a gain of {LEAST_GAIN} here")
    )
    notes = [f"{begins} (times the tokens/s of one sequence: {factors})."]
    try:
        earlier = earlier_gain(Path(model_path), n_gpu_layers=n_gpu_layers)
    except ModelError:  # the file is gone since: what took minutes to measure is worth more than the advice
        earlier = None
    return [*notes, earlier] if earlier else notes


def gains_from(speeds: Mapping[int, float]) -> int | None:
    """The fewest sequences from which on all numbers that were measured are `LEAST_GAIN` times as fast as one."""
    first = None
    for n in sorted(speeds, reverse=True):
        if n == 1 or speeds[n] < LEAST_GAIN * speeds[1]:
            break
        first = n
    return first
