"""What has to be done to a request's logits: worked out once, before the request runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.sampling.random_sampling import Filters
from cppbatch.engine.vocabulary import Vocabulary
from cppbatch.errors import InvalidRequest

Ids = npt.NDArray[np.int64]

_LONGEST_ID = 10  # digits

_VECTORISED = ("penalties", "top_k", "top_p", "min_p", "temperature")
"""The samplers that numpy applies to a whole batch; in this order, which is llama.cpp's."""


class Kind(Enum):
    """Who chooses the token."""

    GREEDY = "greedy"
    """numpy: the largest logit."""
    DRAW = "draw"
    """numpy: top-k, top-p, min-p, temperature, all rows at once."""
    CHAIN = "chain"
    """llama.cpp's samplers, row by row."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """A request's part in sampling."""

    kind: Kind
    filters: Filters
    never: Ids
    """Tokens that cannot come."""
    not_yet: Ids
    """Tokens that cannot come before `min_tokens`."""
    bias_ids: Ids
    bias: npt.NDArray[np.float32]
    dry: Any
    """llama.cpp's DRY sampler, to be cloned; None if it is not used."""
    visible: frozenset[int]
    """Control tokens that are text."""
    n_candidates: int
    """How many of the largest logits are enough; 0: all are wanted."""
    lowered: frozenset[int] | None
    """The largest logit decides, unless it is that of one of these; None: other things matter too."""


def make_sampling_plan(params: SamplingParams, vocab: Vocabulary, longest: int) -> SamplingPlan:
    """`longest`: most tokens of a sequence. Raises `InvalidRequest` for token ids that the vocabulary does not have."""
    check_ids("stop_token_ids", params.stop_token_ids, vocab.n_tokens)
    check_ids("suppress_tokens", params.suppress_tokens, vocab.n_tokens)
    bias = _bias(params, vocab)
    never = {*vocab.suppressed, *params.suppress_tokens}
    not_yet: set[int] = set()
    if not params.is_constrained:  # a grammar alone says when its text may end
        if params.ignore_eos:
            never |= vocab.eog
        if params.min_tokens:
            not_yet = {*vocab.eog, *params.stop_token_ids}
    kind, filters, lowered = _kind(params), _filters(params), {*never, *not_yet, *bias}
    n_candidates = _n_candidates(params, kind, filters, lowered=lowered, raised=bias)
    return SamplingPlan(
        kind=kind,
        filters=filters,
        never=_ids(never),
        not_yet=_ids(not_yet),
        bias_ids=_ids(bias),
        bias=np.array([bias[token] for token in sorted(bias)], np.float32),
        dry=_dry(params, vocab, longest) if "dry" in params.samplers and is_active("dry", params) else None,
        visible=frozenset(_single_tokens(params.visible_tokens, vocab)),
        n_candidates=n_candidates,
        lowered=frozenset(lowered) if kind is Kind.GREEDY and n_candidates and not params.has_penalties else None,
    )


def _n_candidates(
    params: SamplingParams, kind: Kind, filters: Filters, *, lowered: set[int], raised: dict[int, float]
) -> int:
    """As many as are kept, and one for each token that may be lowered; nothing may rise into their midst."""
    sees_all = params.logprobs is not None or params.logits_processor is not None or params.is_constrained
    if kind is Kind.CHAIN or sees_all or any(bias > 0 for bias in raised.values()):
        return 0
    if params.has_penalties:
        penalties = params.presence_penalty, params.frequency_penalty
        if params.penalty_last_n < 0 or params.repetition_penalty < 1 or min(penalties) < 0:
            return 0
    kept = 1 if kind is Kind.GREEDY else filters.top_k
    return kept and kept + len(lowered) + (params.penalty_last_n if params.has_penalties else 0)


def check_ids(field: str, tokens: Sequence[int], n_vocab: int) -> npt.NDArray[np.int32]:
    """Token ids (of the kind that `params.token_ids` lets through) as int32[n].

    Raises `InvalidRequest` for one that the vocabulary does not have.
    """
    ids = np.array(tokens, np.int32)
    unknown = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if len(unknown):
        raise InvalidRequest(f"{field}[{unknown[0]}]", f"is {ids[unknown[0]]}; token ids are 0 to {n_vocab - 1}")
    return ids


def _ids(tokens: Iterable[int]) -> Ids:
    return np.array(sorted(tokens), np.int64)


def _bias(params: SamplingParams, vocab: Vocabulary) -> dict[int, float]:
    """Biases by token id; strings are added to each of their tokens."""
    biases: dict[int, float] = {}
    for key, bias in params.logit_bias.items():
        if isinstance(key, str) and not (key.isascii() and key.isdecimal()):
            tokens = vocab.tokenize(key, add_special=False).tolist()
        elif isinstance(key, int) or len(key) <= _LONGEST_ID:
            tokens = [int(key)]
        else:
            tokens = [vocab.n_tokens]
        for token in tokens:
            if not 0 <= token < vocab.n_tokens:
                message = f"has the token id {str(key)[:20]}; they are 0 to {vocab.n_tokens - 1}"
                raise InvalidRequest("logit_bias", message)
            biases[token] = biases.get(token, 0.0) + bias
    return biases


def _single_tokens(texts: Iterable[str], vocab: Vocabulary) -> Iterator[int]:
    """Of those texts that are one token each."""
    for text in texts:
        tokens = vocab.tokenize(text, add_special=False).tolist()
        if len(tokens) == 1 and vocab.piece(tokens[0], special=True) == text.encode("utf-8", "replace"):
            yield tokens[0]


def _dry(params: SamplingParams, vocab: Vocabulary, longest: int) -> Any:
    last_n = params.dry_penalty_last_n
    return vocab.dry_sampler(
        multiplier=params.dry_multiplier,
        base=params.dry_base,
        allowed_length=params.dry_allowed_length,
        last_n=min(last_n, longest) if last_n >= 0 else longest,
        breakers=params.dry_sequence_breakers,
    )


def is_active(name: str, params: SamplingParams) -> bool:
    """Whether this sampler would do anything."""
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


def _kind(params: SamplingParams) -> Kind:
    active = [name for name in params.samplers if is_active(name, params)]
    if params.is_greedy:
        return Kind.CHAIN if "dry" in active else Kind.GREEDY
    if params.mirostat or params.adaptive_target >= 0 or params.dynatemp_range:
        return Kind.CHAIN
    return Kind.DRAW if active == [name for name in _VECTORISED if name in active] else Kind.CHAIN


def _filters(params: SamplingParams) -> Filters:
    """The numbers of the vectorised samplers; those left out of `samplers` do nothing."""
    wanted = params.samplers
    return Filters(
        top_k=params.top_k if "top_k" in wanted else 0,
        top_p=params.top_p if "top_p" in wanted else 1.0,
        min_p=params.min_p if "min_p" in wanted else 0.0,
        temperature=params.temperature if "temperature" in wanted else 1.0,
    )
