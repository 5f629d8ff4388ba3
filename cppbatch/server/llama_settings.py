"""The sampling parameters of a completion, under llama-server's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cppbatch.engine.params import KINDS, PARAMS, UNLIMITED, SamplingParams

RANDOM_SEED = 2**32 - 1
"""llama-server's value for a random seed."""

LLAMA_NAMES = {"typical_p": "typ_p"}
"""llama-server's names of samplers, where they differ from those in `SamplingParams`."""


class TokenBias(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `logit_bias`."""

    token: int
    bias: float | None
    """None: the token is never chosen."""


_SAME = tuple(
    name
    for name in (*PARAMS, "stop", "post_sampling_probs")
    if name not in ("repetition_penalty", "penalty_last_n", "samplers", "seed")
)
"""The settings that `SamplingParams` has under the same names."""
if TYPE_CHECKING:
    _SameSettings = msgspec.Struct
else:
    _SameSettings = msgspec.defstruct(
        "_SameSettings", [(name, KINDS[name]) for name in _SAME], module=__name__, frozen=True, kw_only=True
    )


class GenerationSettings(_SameSettings, frozen=True, kw_only=True):
    """How a completion is generated."""

    seed: int
    """2^32 - 1: random."""
    repeat_penalty: float
    repeat_last_n: int
    max_tokens: int
    """-1: unlimited."""
    n_predict: int
    """The same."""
    n_keep: int
    n_discard: int
    stream: bool
    logit_bias: list[TokenBias]
    n_probs: int
    min_keep: int = 0
    grammar: str
    samplers: list[str]
    timings_per_token: bool


def generation_settings(
    params: SamplingParams,
    *,
    n_keep: int = 0,
    n_discard: int = 0,
    stream: bool = False,
    timings_per_token: bool = False,
    seed: int | None = None,
    end_tokens: Sequence[int] = (),
) -> GenerationSettings:
    """The settings of these parameters. `seed`: the one that was used; None: not known yet. `end_tokens`: the model's,
    which `ignore_eos` suppresses."""
    biases = [TokenBias(token=int(token), bias=bias) for token, bias in params.logit_bias.items()]
    if params.ignore_eos:
        biases += [TokenBias(token=token, bias=None) for token in end_tokens]
    n_predict = UNLIMITED if params.max_tokens is None else params.max_tokens
    return GenerationSettings(
        **{name: getattr(params, name) for name in _SAME},
        seed=RANDOM_SEED if seed is None else seed,
        repeat_penalty=params.repetition_penalty,
        repeat_last_n=params.penalty_last_n,
        max_tokens=n_predict,
        n_predict=n_predict,
        n_keep=n_keep,
        n_discard=n_discard,
        stream=stream,
        logit_bias=biases,
        n_probs=params.logprobs or 0,
        grammar=params.grammar or "",
        samplers=[LLAMA_NAMES.get(name, name) for name in params.samplers],
        timings_per_token=timings_per_token,
    )
