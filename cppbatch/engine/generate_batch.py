"""A whole batch in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import Completion, Prompt


def generate_batch(
    model: str | Path,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    progress: bool = False,
    **settings: Any,
) -> list[Completion]:
    """`BatchInferenceEngine.generate` in one line: loads a model, continues every prompt, frees the model."""
    with BatchInferenceEngine(model, **settings) as engine:
        return engine.generate(prompts, params, progress=progress)
