"""Sets of LoRA adapters and control vectors: only sequences with the same set may share a step, or keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cppbatch.engine.model_info import AdapterInfo, ModelInfo
from cppbatch.engine.params import format_value
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import InvalidRequest

AdapterSet = tuple[tuple[int, float], ...]
"""Adapter numbers in ascending order, with their nonzero scales rounded to float32. The numbers of control vectors
follow those of LoRA adapters. Empty: none of either."""


def set_of_request(request: GenerationRequest, info: ModelInfo) -> AdapterSet:
    """The set for a request's `lora` and `control_vectors`. Raises as `adapter_set`."""
    vectors = adapter_set(request.control_vectors, info.control_vectors, "control_vectors")
    return *adapter_set(request.lora, info.adapters), *((len(info.adapters) + i, scale) for i, scale in vectors)


def adapter_set(
    wanted: Mapping[str | int, float] | None, known: Sequence[AdapterInfo], field: str = "lora"
) -> AdapterSet:
    """The set for a field of a request; None: the scales with which the engine was started.

    Raises `InvalidRequest` for an unknown adapter.
    """
    kind = "adapter" if field == "lora" else "control vector"
    if wanted is None:
        scales = {i: adapter.scale for i, adapter in enumerate(known)}
    else:
        numbers = {adapter.name: i for i, adapter in enumerate(known)}
        scales = {}
        for key, scale in wanted.items():
            number = numbers.get(key) if isinstance(key, str) else key
            if number is None or not 0 <= number < len(known):
                names = ", ".join(f"{adapter.name!r} ({i})" for i, adapter in enumerate(known))
                raise InvalidRequest(field, f"{kind} {format_value(key)} not found; available: {names or 'none'}")
            if number in scales:
                message = f"contains the {kind} {known[number].name!r} twice, by name and by number"
                raise InvalidRequest(field, message)
            scales[number] = scale
    rounded = {i: float(np.float32(scale)) for i, scale in sorted(scales.items())}
    return tuple((i, scale) for i, scale in rounded.items() if scale)
