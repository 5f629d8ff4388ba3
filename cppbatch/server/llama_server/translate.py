"""llama-server's names and values for what `SamplingParams` has."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from cppbatch.engine.params import INTEGER_RANGES, MOST_BIASES, RANGES, SAMPLERS, SamplingParams, shown
from cppbatch.errors import InvalidRequest
from cppbatch.server.llama_server.schemas import LlamaFields
from cppbatch.server.llama_server.tokens import tokens_of
from cppbatch.server.serving import Serving

Json = dict[str, Any]
Fields = TypeVar("Fields", bound=LlamaFields)

RANDOM_SEED = 2**32 - 1
"""How llama-server writes "any seed"."""

_CLAMPED = ("temperature", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "mirostat")
"""Values out of range mean the nearest one that is not: a temperature of -1 is greedy, a top_k of -1 takes all."""

_NAMES = {"typical_p": "typ_p"}
_SPELLINGS = {
    "penalties": "e", "dry": "d", "top_n_sigma": "s topnsigma", "top_k": "k topk", "typical_p": "y typ_p typp typ",
    "top_p": "p topp nucleus", "min_p": "m minp", "xtc": "x", "temperature": "t temp",
}  # fmt: skip
_SAMPLERS = {spelling: name for name, all_ in _SPELLINGS.items() for spelling in (name, *all_.split())}
_LEFT_OUT = ("i", "infill", "a", "adaptive_p", "adaptivep")
"""Ours has no sampler for infilling; `adaptive_target` alone turns the other one on."""

_MOST_FIELDS, _LONGEST_FIELD = 100, 256
_MOST_TEXTS = 1000  # in logit_bias: each has to be tokenised


async def translated(body: Fields, serving: Serving) -> Fields:
    """The body with our values. Raises `InvalidRequest` for what this server does not have."""
    _refuse(body)
    return msgspec.structs.replace(
        body,
        n=body.n if body.n_cmpl is None else body.n_cmpl,
        seed=None if body.seed == RANDOM_SEED else body.seed,
        n_predict=None if body.n_predict == -1 else body.n_predict,
        n_probs=body.n_probs or None,
        stop=_not_empty(body.stop),
        grammar=body.grammar or None,
        json_schema={"type": "object"} if body.json_schema == {} else body.json_schema,
        samplers=None if body.samplers is None else _samplers(body.samplers),
        **_clamped(body),
        **await _biases(body, serving),
    )


def _refuse(body: LlamaFields) -> None:
    if body.post_sampling_probs:
        message = "is not served: log-probabilities here are those of the model itself, before any sampler"
        raise InvalidRequest("post_sampling_probs", message)
    for name, most in (("min_keep", 1), ("n_indent", 0)):
        if (getattr(body, name) or 0) > most:
            raise InvalidRequest(name, f"is {getattr(body, name)}, which is not served here; leave it out")
    fields = body.response_fields or []
    if len(fields) > _MOST_FIELDS or max(map(len, fields), default=0) > _LONGEST_FIELD:
        message = f"has {len(fields):,} fields; {_MOST_FIELDS} may be, of {_LONGEST_FIELD} letters each"
        raise InvalidRequest("response_fields", message)
    if body.best_of is not None:
        raise InvalidRequest("best_of", "is served by /v1/completions, not here; n_cmpl gives several texts")


def _not_empty(stop: str | list[str] | None) -> list[str] | None:
    return None if stop is None else [string for string in ([stop] if isinstance(stop, str) else stop) if string]


def _clamped(body: LlamaFields) -> Json:
    ranges: dict[str, tuple[float, float]] = {**RANGES, **INTEGER_RANGES}
    given = {name: getattr(body, name) for name in _CLAMPED}
    return {
        name: type(value)(max(ranges[name][0], min(ranges[name][1], value)))
        for name, value in given.items()
        if value is not None
    }


def _samplers(names: list[str] | str) -> list[str]:
    known = []
    for i, name in enumerate(names):  # of one string, its letters
        plain = name.lower().replace("-", "_")
        if plain in _LEFT_OUT:
            continue
        if plain not in _SAMPLERS:
            shown = ", ".join(_NAMES.get(each, each) for each in SAMPLERS)
            raise InvalidRequest(f"samplers[{i}]", f"is {name!r}; there are {shown}")
        known.append(_SAMPLERS[plain])
    return known


def sampler_names(params: SamplingParams) -> list[str]:
    """Its samplers as llama-server calls them."""
    return [_NAMES.get(name, name) for name in params.samplers]


async def _biases(body: LlamaFields, serving: Serving) -> Json:
    """`logit_bias` by token ids, and what never comes."""
    if body.logit_bias is None:
        return {}
    if len(body.logit_bias) > MOST_BIASES:
        raise InvalidRequest("logit_bias", f"has {len(body.logit_bias):,} entries; {MOST_BIASES:,} may be")
    if isinstance(body.logit_bias, dict):
        pairs = [(int(key) if key.isascii() and key.isdigit() else key, bias) for key, bias in body.logit_bias.items()]
    else:
        pairs = [_pair(i, entry) for i, entry in enumerate(body.logit_bias)]
    if sum(isinstance(key, str) for key, _ in pairs) > _MOST_TEXTS:
        raise InvalidRequest("logit_bias", f"has more than {_MOST_TEXTS} texts; give token ids")
    biases: dict[str, float] = {}
    never = list(body.suppress_tokens or [])
    for key, bias in pairs:
        if isinstance(key, int):
            ids = [key]
        else:
            tokens = await tokens_of(serving, key, "logit_bias", add_special=False, parse_special=False)
            ids = [token.id for token in tokens]
        if bias is False:
            never.extend(ids)
            continue
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            message = f"is {shown(bias)} for {shown(key)}; it must be a number from -100 to 100, or false"
            raise InvalidRequest("logit_bias", message)
        for token in ids:
            biases[str(token)] = biases.get(str(token), 0.0) + bias
    return {"logit_bias": biases, "suppress_tokens": never or None}


def _pair(i: int, entry: object) -> tuple[int | str, object]:
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], (int, str)) and entry[0] is not True:
        return entry[0], entry[1]
    raise InvalidRequest(f"logit_bias[{i}]", f"is {entry!r:.80}; it must be [a token id or a text, a bias or false]")
