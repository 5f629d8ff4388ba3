"""llama-server's request fields for sampling, and their translation to `SamplingFields`."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import msgspec

from cppbatch.engine.params import MOST_BIASES, PARAMS, RANGES, SAMPLER_SPELLINGS, SAMPLERS, format_value, token_id
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.llama_result import LLAMA_NAMES, RANDOM_SEED
from cppbatch.server.answer.mixed_prompts import tokenize
from cppbatch.server.fields.sampling import SamplingFields, TimingFields
from cppbatch.server.models.serving import Serving

Json = dict[str, Any]

_SAMPLERS = {spelling: name for name, others in SAMPLER_SPELLINGS.items() for spelling in (name, *others.split())}
_IGNORED_SAMPLERS = ("i", "infill", "a", "adaptive_p", "adaptivep")
"""Ignored: infill is not implemented, and `adaptive_target` alone enables the adaptive sampler."""
SAMPLER_NAMES = frozenset((*_SAMPLERS, *_IGNORED_SAMPLERS))
"""All spellings of samplers, of which some are a single letter."""

_MAX_RESPONSE_FIELDS, _MAX_RESPONSE_FIELD_LENGTH = 100, 256
_MAX_BIAS_TEXTS = 1000  # in logit_bias; each is tokenised


class LlamaFields(TimingFields, kw_only=True):
    """The fields of `/completion` and `/infill`, except the prompt. Ignores unknown fields, and `n_cache_reuse`,
    because parts of a prompt are never moved to other positions.
    """

    _ALIASES: ClassVar[dict[str, str]] = {
        **SamplingFields._ALIASES,
        "max_tokens": "n_predict",
        "logprobs": "n_probs",
    }

    n_predict: int | None = None
    """Maximum generated tokens. -1: until the model ends the text or the context is full; 0: only compute the prompt,
    for later requests."""
    n_cmpl: int | None = None
    """Completions per prompt."""
    n_probs: int | None = None
    """Return log-probabilities of this many most likely tokens, up to 20."""
    n_keep: int | None = None
    """With `--context-shift`: initial tokens to keep when the context is full; -1: the prompt. None: `--keep`."""
    n_discard: int | None = None
    """With `--context-shift`: number of tokens after those to drop; 0: half of them."""
    min_keep: int | None = None
    """Values above 1 are not supported."""
    n_indent: int | None = None
    """Values above 0 are not supported."""
    t_max_predict_ms: float | None = None
    """Milliseconds after the first token, after which the next newline ends the text; 0 or less: no limit."""
    return_tokens: bool | None = None
    """Return the generated token ids; streams always do."""
    response_fields: list[str] | None = None
    """Return only these fields; `a/b` is field b of field a. Empty list: all."""
    samplers: list[str] | str | None = None  # type: ignore[assignment]
    """llama-server's names, or a string with one letter per sampler."""
    logit_bias: dict[str, Any] | list[Any] | None = None  # type: ignore[assignment]
    """An object, or pairs of a token id or text and a bias. A bias of false suppresses the tokens."""

    @property
    def echo(self) -> bool | None:
        """Whether to echo the prompt: required for `max_tokens` 0. The builder omits the prompt."""
        return True if self.n_predict == 0 else None


Fields = TypeVar("Fields", bound=LlamaFields)


async def to_sampling_fields(body: Fields, serving: Serving) -> Fields:
    """The body with the values that `SamplingFields` expects. Raises `InvalidRequest` for unsupported values."""
    _check_supported(body)
    return msgspec.structs.replace(
        body,
        n=body.n if body.n_cmpl is None else body.n_cmpl,
        seed=None if body.seed == RANDOM_SEED else body.seed,
        n_probs=body.n_probs or None,
        stop=_without_empty(body.stop),
        grammar=body.grammar or None,
        json_schema={"type": "object"} if body.json_schema == {} else body.json_schema,
        samplers=None if body.samplers is None else sampler_names(body.samplers),
        **_clamp(body),
        **await _biases(body, serving),
    )


def _check_supported(body: LlamaFields) -> None:
    for name, most in (("min_keep", 1), ("n_indent", 0)):
        if (getattr(body, name) or 0) > most:
            raise InvalidRequest(name, f"is {getattr(body, name)}, which is not supported; leave it out")
    fields = body.response_fields or []
    if len(fields) > _MAX_RESPONSE_FIELDS or max(map(len, fields), default=0) > _MAX_RESPONSE_FIELD_LENGTH:
        raise InvalidRequest(
            "response_fields",
            f"has {len(fields):,} fields; the limit is {_MAX_RESPONSE_FIELDS} fields of {_MAX_RESPONSE_FIELD_LENGTH} "
            "characters each",
        )
    if body.best_of is not None:
        raise InvalidRequest("best_of", "is only supported by /v1/completions; use n_cmpl for several completions")


def _without_empty(stop: str | list[str] | None) -> list[str] | None:
    return None if stop is None else [string for string in ([stop] if isinstance(stop, str) else stop) if string]


def _clamp(body: LlamaFields) -> Json:
    given = {name: getattr(body, name) for name, param in PARAMS.items() if param.is_clamped}
    return {
        name: type(value)(max(RANGES[name].low, min(RANGES[name].high, value)))
        for name, value in given.items()
        if value is not None
    }


def sampler_names(names: list[str] | str) -> list[str]:
    """The samplers' names in `SamplingParams`, from a list of llama-server's names or a string of letters."""
    found = []
    for i, name in enumerate(names):
        spelling = name.lower().replace("-", "_")
        if spelling in _IGNORED_SAMPLERS:
            continue
        if spelling not in _SAMPLERS:
            known = ", ".join(LLAMA_NAMES.get(each, each) for each in SAMPLERS)
            raise InvalidRequest(f"samplers[{i}]", f"is {name!r}; it must be one of {known}")
        found.append(_SAMPLERS[spelling])
    return found


async def _biases(body: LlamaFields, serving: Serving) -> Json:
    """`logit_bias` by token id, and the suppressed tokens."""
    if body.logit_bias is None:
        return {}
    if len(body.logit_bias) > MOST_BIASES:
        raise InvalidRequest("logit_bias", f"has {len(body.logit_bias):,} entries; the limit is {MOST_BIASES:,}")
    if isinstance(body.logit_bias, dict):
        pairs = [(key if (number := token_id(key)) is None else number, bias) for key, bias in body.logit_bias.items()]
    else:
        pairs = [_bias_pair(i, entry) for i, entry in enumerate(body.logit_bias)]
    if sum(isinstance(key, str) for key, _ in pairs) > _MAX_BIAS_TEXTS:
        raise InvalidRequest("logit_bias", f"has more than {_MAX_BIAS_TEXTS} texts; give token ids")
    biases: dict[str, float] = {}
    suppressed = list(body.suppress_tokens or [])
    for key, bias in pairs:
        if isinstance(key, int):
            ids = [key]
        else:
            tokens = await tokenize(serving, key, "logit_bias", add_special=False, parse_special=False)
            ids = [token.id for token in tokens]
        if bias is False:
            suppressed.extend(ids)
            continue
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            message = f"is {format_value(bias)} for {format_value(key)}; it must be a number from -100 to 100, or false"
            raise InvalidRequest("logit_bias", message)
        for token in ids:  # as in llama-server, the biases of a token add up
            biases[str(token)] = max(-100.0, min(100.0, biases.get(str(token), 0.0) + bias))
    return {"logit_bias": biases, "suppress_tokens": suppressed or None}


def _bias_pair(i: int, entry: object) -> tuple[int | str, object]:
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], (int, str)) and entry[0] is not True:
        return entry[0], entry[1]
    raise InvalidRequest(f"logit_bias[{i}]", f"is {entry!r:.80}; it must be [token id or text, bias or false]")
