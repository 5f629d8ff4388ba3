"""`SamplingPlan`: how a request is sampled, determined once, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams, token_id
from cppbatch.engine.vocabulary import Vocabulary
from cppbatch.errors import InvalidRequest

Ids = npt.NDArray[np.int64]


_VECTORISED = ("penalties", "top_k", "top_p", "min_p", "temperature")
"""The samplers that numpy applies to all rows at once, if they are in this order, which is llama.cpp's."""


class SamplingType(Enum):
    """How the token is selected."""

    GREEDY = "greedy"
    """The largest logit, by numpy."""
    RANDOM = "random"
    """Top-k, top-p, min-p and temperature, by numpy for all rows at once."""
    CHAIN = "chain"
    """A chain of llama.cpp's samplers, row by row."""


class Filters(NamedTuple):
    """One row's settings. `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    top_k: int
    top_p: float
    min_p: float
    temperature: float


class SamplingPlan(msgspec.Struct, frozen=True):
    """How a request is sampled: its `SamplingParams`, resolved against the vocabulary."""

    sampling_type: SamplingType
    filters: Filters
    banned_ids: Ids
    """Tokens that are never sampled, ascending."""
    min_tokens_ids: Ids
    """Tokens that are not sampled before `min_tokens`, ascending."""
    bias_ids: Ids
    bias: npt.NDArray[np.float32]
    dry_sampler: Any
    """llama.cpp's DRY sampler, to be cloned; None if DRY is off."""
    visible_ids: frozenset[int]
    """Control tokens to include in the text."""
    n_candidates: int
    """The number of largest logits that suffice for the same token as the whole row; 0: the whole row is needed."""
    greedy_unless: frozenset[int] | None
    """The token is the largest logit, unless it is one of these (banned or biased). None: more work is needed."""


def make_sampling_plan(params: SamplingParams, vocab: Vocabulary, max_tokens: int) -> SamplingPlan:
    """Resolves a request's parameters. `max_tokens`: maximum length of the sequence, including the prompt.

    Raises `InvalidRequest` for token ids that the vocabulary does not contain.
    """
    check_ids("stop_token_ids", params.stop_token_ids, vocab.n_tokens)
    check_ids("suppress_tokens", params.suppress_tokens, vocab.n_tokens)
    bias = _biases(params, vocab)
    banned = {*vocab.suppressed, *params.suppress_tokens}
    min_tokens_ids: set[int] = set()
    if not params.is_constrained:  # otherwise the grammar alone determines the end of the text
        if params.ignore_eos:
            banned |= vocab.eog
        if params.min_tokens:
            min_tokens_ids = {*vocab.eog, *params.stop_token_ids}
    kind, filters, lowered = _sampling_type(params), _filters(params), {*banned, *min_tokens_ids, *bias}
    n_candidates = _n_candidates(params, kind, filters, n_lowered=len(lowered), bias=bias)
    is_plain_greedy = kind is SamplingType.GREEDY and n_candidates and not params.has_penalties
    return SamplingPlan(
        sampling_type=kind,
        filters=filters,
        banned_ids=_ids(banned),
        min_tokens_ids=_ids(min_tokens_ids),
        bias_ids=_ids(bias),
        bias=np.array([bias[token] for token in sorted(bias)], np.float32),
        dry_sampler=_dry_sampler(params, vocab, max_tokens)
        if "dry" in params.samplers and is_active("dry", params)
        else None,
        visible_ids=frozenset(_single_tokens(params.visible_tokens, vocab)),
        n_candidates=n_candidates,
        greedy_unless=frozenset(lowered) if is_plain_greedy else None,
    )


def _n_candidates(
    params: SamplingParams, kind: SamplingType, filters: Filters, *, n_lowered: int, bias: dict[int, float]
) -> int:
    """`SamplingPlan.n_candidates`: the tokens kept by the filters, plus one per token that may be lowered.

    0 if any other logit could rise above these.
    """
    sees_all = params.logprobs is not None or params.logits_processor is not None or params.is_constrained
    if kind is SamplingType.CHAIN or sees_all or any(value > 0 for value in bias.values()):
        return 0
    if params.has_penalties:
        penalties = params.presence_penalty, params.frequency_penalty
        if params.penalty_last_n < 0 or params.repetition_penalty < 1 or min(penalties) < 0:
            return 0
    kept = 1 if kind is SamplingType.GREEDY else filters.top_k
    return kept and kept + n_lowered + (params.penalty_last_n if params.has_penalties else 0)


def check_ids(field: str, tokens: Sequence[int], n_vocab: int) -> npt.NDArray[np.int32]:
    """Token ids as int32[n], already validated by `params.token_ids`.

    Raises `InvalidRequest` for an id that the vocabulary does not contain.
    """
    ids = np.array(tokens, np.int32)
    unknown = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if len(unknown):
        raise InvalidRequest(f"{field}[{unknown[0]}]", f"is {ids[unknown[0]]}; token ids are 0 to {n_vocab - 1}")
    return ids


def _ids(tokens: Iterable[int]) -> Ids:
    return np.array(sorted(tokens), np.int64)


def _biases(params: SamplingParams, vocab: Vocabulary) -> dict[int, float]:
    """Biases by token id; the bias of a text is added to each of its tokens."""
    biases: dict[int, float] = {}
    for key, bias in params.logit_bias.items():
        given = key if isinstance(key, int) else token_id(key)
        tokens = vocab.tokenize(str(key), add_special=False).tolist() if given is None else [given]
        for token in tokens:
            if not 0 <= token < vocab.n_tokens:
                message = f"contains the token id {str(key)[:20]}; token ids are 0 to {vocab.n_tokens - 1}"
                raise InvalidRequest("logit_bias", message)
            biases[token] = biases.get(token, 0.0) + bias
    return biases


def _single_tokens(texts: Iterable[str], vocab: Vocabulary) -> Iterator[int]:
    """The ids of the texts that are a single token."""
    for text in texts:
        tokens = vocab.tokenize(text, add_special=False).tolist()
        if len(tokens) == 1 and vocab.piece(tokens[0], special=True) == text.encode("utf-8", "replace"):
            yield tokens[0]


def _dry_sampler(params: SamplingParams, vocab: Vocabulary, max_tokens: int) -> Any:
    last_n = params.dry_penalty_last_n
    return vocab.dry_sampler(
        multiplier=params.dry_multiplier,
        base=params.dry_base,
        allowed_length=params.dry_allowed_length,
        last_n=min(last_n, max_tokens) if last_n >= 0 else max_tokens,
        breakers=tuple(params.dry_sequence_breakers),
    )


def is_active(name: str, params: SamplingParams) -> bool:
    """Whether this sampler has an effect with these parameters."""
    tests: dict[str, Callable[[], bool]] = {
        "penalties": lambda: params.has_penalties,
        "dry": lambda: params.dry_multiplier > 0 and params.dry_base >= 1 and params.dry_penalty_last_n != 0,
        "top_n_sigma": lambda: params.top_n_sigma > 0,
        "top_k": lambda: params.top_k > 0,
        "typical_p": lambda: params.typical_p < 1,
        "top_p": lambda: params.top_p < 1,
        "min_p": lambda: params.min_p > 0,
        "xtc": lambda: params.xtc_probability > 0 and params.xtc_threshold <= 0.5,
        "temperature": lambda: True,
    }
    return tests[name]()


def _sampling_type(params: SamplingParams) -> SamplingType:
    active = [name for name in params.samplers if is_active(name, params)]
    if params.is_greedy:
        return SamplingType.CHAIN if "dry" in active else SamplingType.GREEDY
    if params.mirostat or params.adaptive_target >= 0 or params.dynatemp_range:
        return SamplingType.CHAIN
    in_order = [name for name in _VECTORISED if name in active]
    return SamplingType.RANDOM if active == in_order else SamplingType.CHAIN


def _filters(params: SamplingParams) -> Filters:
    """The settings of the vectorised samplers; samplers not in `samplers` are off."""
    names = params.samplers
    return Filters(
        top_k=params.top_k if "top_k" in names else 0,
        top_p=params.top_p if "top_p" in names else 1.0,
        min_p=params.min_p if "min_p" in names else 0.0,
        temperature=params.temperature if "temperature" in names else 1.0,
    )
