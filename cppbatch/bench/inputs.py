"""Prompts to measure with, and whether a model can run them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.engine.model_info import ModelInfo
from cppbatch.errors import ConfigError

_FIRST_TOKEN = 10  # those before are special in most vocabularies


def random_prompt(draw: np.random.Generator, n_tokens: int, n_vocab: int) -> npt.NDArray[np.int32]:
    """int32[n_tokens] of token ids. No two begin alike, and what they say is nothing: speed does not depend on it."""
    return draw.integers(min(_FIRST_TOKEN, n_vocab - 1), n_vocab, n_tokens, dtype=np.int32)


def check_can_run(info: ModelInfo, n_prompt: int, n_new: int) -> None:
    """Raises `ConfigError` for a model that gives vectors, and where such requests are longer than it allows."""
    if info.pooling:
        raise ConfigError(f"{info.name} gives vectors; this measures models that generate text. Name another one (-m)")
    if n_prompt + n_new > info.max_sequence:
        raise ConfigError(
            f"{n_prompt} prompt tokens and {n_new} new ones are {n_prompt + n_new}; {info.name} takes "
            f"{info.max_sequence}. Lower --prompt-tokens or --new-tokens"
        )
