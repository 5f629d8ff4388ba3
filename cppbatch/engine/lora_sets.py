"""LoRA adapter sets: only sequences with the same set may share a step, or keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cppbatch.engine.model_info import AdapterInfo
from cppbatch.engine.params import format_value
from cppbatch.errors import InvalidRequest

AdapterSet = tuple[tuple[int, float], ...]
"""Adapter numbers in ascending order, with their nonzero scales rounded to float32. Empty: no adapter."""


def adapter_set(wanted: Mapping[str | int, float] | None, known: Sequence[AdapterInfo]) -> AdapterSet:
    """The set for a request's `lora`; None: the scales with which the engine was started.

    Raises `InvalidRequest` for an unknown adapter.
    """
    if wanted is None:
        scales = {i: adapter.scale for i, adapter in enumerate(known)}
    else:
        numbers = {adapter.name: i for i, adapter in enumerate(known)}
        scales = {}
        for key, scale in wanted.items():
            number = numbers.get(key) if isinstance(key, str) else key
            if number is None or not 0 <= number < len(known):
                names = ", ".join(f"{adapter.name!r} ({i})" for i, adapter in enumerate(known))
                raise InvalidRequest("lora", f"adapter {format_value(key)} not found; available: {names or 'none'}")
            if number in scales:
                raise InvalidRequest(
                    "lora", f"contains the adapter {known[number].name!r} twice, by name and by number"
                )
            scales[number] = scale
    rounded = {i: float(np.float32(scale)) for i, scale in sorted(scales.items())}
    return tuple((i, scale) for i, scale in rounded.items() if scale)
