"""Which LoRA adapters a request is computed with: only those with the same set may share a step, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cppbatch.engine.model_info import AdapterInfo
from cppbatch.engine.params import shown
from cppbatch.errors import InvalidRequest

AdapterSet = tuple[tuple[int, float], ...]
"""Adapters by their place, rising, with their scales as float32 has them; none is 0. Empty: the model alone."""


def adapter_set(wanted: Mapping[str | int, float] | None, known: Sequence[AdapterInfo]) -> AdapterSet:
    """The set that a request's `lora` means. Raises `InvalidRequest` for adapters that there are none of."""
    if wanted is None:
        scales = {i: adapter.scale for i, adapter in enumerate(known)}
    else:
        numbers = {adapter.name: i for i, adapter in enumerate(known)}
        scales = {}
        for key, scale in wanted.items():
            number = numbers.get(key) if isinstance(key, str) else key
            if number is None or not 0 <= number < len(known):
                there = ", ".join(f"{adapter.name!r} ({i})" for i, adapter in enumerate(known))
                raise InvalidRequest("lora", f"there is no adapter {shown(key)}; there are {there or 'none (--lora)'}")
            if number in scales:
                raise InvalidRequest("lora", f"has the adapter {known[number].name!r} twice, by name and by number")
            scales[number] = scale
    rounded = {i: float(np.float32(scale)) for i, scale in sorted(scales.items())}
    return tuple((i, scale) for i, scale in rounded.items() if scale)
