"""The request fields shared by all generation endpoints, and their conversion to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from cppbatch.engine.params import GRAMMARS, KINDS, RANGES, SWITCHES, SamplingParams
from cppbatch.engine.request import GenerationRequest, UsageEvents, n_candidates
from cppbatch.errors import InvalidRequest, client_names
from cppbatch.server.fields.structured import CONSTRAINTS, StructuredFields
from cppbatch.server.http.limits import MAX_CHOICES
from cppbatch.setting import INT32_MAX

_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "standard_only")


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = False


class LoraScale(msgspec.Struct):
    """An entry of `lora`, in llama-server's form."""

    id: Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
    """The index of the adapter in --lora, from 0."""
    scale: float


_NOT_SHARED = ("logprobs", "echo", "compact_json", "penalize_prompt")
"""Numbers and switches that some APIs lack or define differently."""
if TYPE_CHECKING:
    _Numbers = StructuredFields
else:
    _Numbers = msgspec.defstruct(
        "_Numbers",
        [(name, KINDS[name] | None, None) for name in (*RANGES, *SWITCHES) if name not in _NOT_SHARED],
        bases=(StructuredFields,),
        module=__name__,
        kw_only=True,
    )
    """The numbers and switches of `SamplingParams`. Type checkers know those declared in `SamplingFields`."""


class SamplingFields(_Numbers, kw_only=True):
    """Names and meanings as in `SamplingParams`. None: not given."""

    _ALIASES: ClassVar[dict[str, str]] = {
        "repetition_penalty": "repeat_penalty",
        "penalty_last_n": "repeat_last_n",
    }
    """Other names for fields of `SamplingParams`. A value under the other name takes precedence."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sse_ping_interval: int | None = None
    """Seconds of silence after which a stream sends a ping; -1: never. Default: --sse-ping-interval."""

    max_tokens: int | None = None
    seed: int | None = None
    top_k: int | None = None
    """-1 means 0 (all), as in vLLM."""
    repeat_penalty: float | None = None
    """llama.cpp's name for `repetition_penalty`."""
    repeat_last_n: int | None = None
    """llama.cpp's name for `penalty_last_n`."""
    dry_sequence_breakers: list[str] | None = None
    samplers: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    suppress_tokens: list[int] | None = None
    speculative_n_max: int | None = msgspec.field(default=None, name="speculative.n_max")
    """llama-server's limit on draft tokens. 0 means `speculate` false; otherwise the engine chooses the number."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    visible_tokens: list[str] | None = None

    service_tier: str | None = None
    """One of OpenAI's or Anthropic's values. Ignored: this server has a single tier."""
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_prompt: bool | None = None
    cache_salt: str | None = None
    id_slot: int | None = None
    lora: dict[str, float] | list[LoraScale] | None = None
    """LoRA adapters and scales: {"name": 0.5}, or llama-server's [{"id": 0, "scale": 0.5}]. Others are off.
    None: the server's scales (--lora)."""
    control_vectors: dict[str, float] | None = None
    """Control vectors and scales: {"name": 0.5}. Others are off. None: the server's scales (--control-vector)."""

    @property
    def n_choices(self) -> int:
        """The number of completions of each prompt in the response. Raises `InvalidRequest`."""
        return _count("n", self.n)

    @property
    def n_candidates(self) -> int:
        """The number of completions to generate per prompt, of which the best are returned. Raises `InvalidRequest`."""
        n = self.n_choices
        candidates = n_candidates(n, None if self.best_of is None else _count("best_of", self.best_of))
        if candidates > n and self.stream:
            raise InvalidRequest(
                "best_of", "cannot be combined with `stream`: the best candidates are only known at the end"
            )
        return candidates

    def params(self, **defaults: Any) -> SamplingParams:
        """The fields as `SamplingParams`. Raises `InvalidRequest` with the client's field name.

        `defaults`: for fields that the client has not set. A default for a grammar field (`GRAMMARS`) is a requirement
        of the endpoint, such as a response format, and conflicts with the client's own grammar.
        """
        given = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__}
        given |= {ours: getattr(self, alias) for ours, alias in self._given_aliases.items()} | dict.fromkeys(GRAMMARS)
        if (constraint := self.constraint) and not constraint.is_schema:
            given[constraint.kind] = constraint.value
            if not defaults.keys().isdisjoint(GRAMMARS):
                message = "cannot be combined with another output format or a required tool call"
                raise InvalidRequest(constraint.field, message)
        if getattr(self, "wants_logprobs", None):  # a separate field in chat APIs
            defaults["logprobs"] = 0
        elif getattr(self, "top_logprobs", None) is not None:
            raise InvalidRequest("top_logprobs", "requires logprobs to be true")
        given["compact_json"] = self.is_compact or None
        if self.top_k == -1:
            given["top_k"] = 0
        if self.speculative_n_max is not None and self.speculative_n_max <= 0:
            given["speculate"] = False
        with client_names(self.field_names):
            return SamplingParams(**defaults | {name: value for name, value in given.items() if value is not None})

    @property
    def _given_aliases(self) -> dict[str, str]:
        return {ours: alias for ours, alias in self._ALIASES.items() if getattr(self, alias) is not None}

    @property
    def field_names(self) -> dict[str, str]:
        """{a field of `SamplingParams`: the client's name for it}, for errors. Raises `InvalidRequest`."""
        constraint = self.constraint
        return self._given_aliases | ({constraint.kind: constraint.field} if constraint else {})

    def check_service_tier(self) -> None:
        """Raises `InvalidRequest` for an unknown service tier."""
        if self.service_tier is not None and self.service_tier not in _SERVICE_TIERS:
            raise InvalidRequest(
                "service_tier", f"is {self.service_tier!r}; it must be one of {', '.join(_SERVICE_TIERS)}"
            )

    def options(self) -> dict[str, Any]:
        """The given fields of `GenerationRequest`: priority, timeouts, caching, adapters. Raises `InvalidRequest`."""
        given = {name: getattr(self, name, None) for name in GenerationRequest.__struct_fields__}
        given["lora"] = scales_by_number(self.lora) if isinstance(self.lora, list) else self.lora
        return {name: value for name, value in given.items() if value is not None and name not in _NO_OPTIONS}


class TimingFields(SamplingFields, kw_only=True):
    """Fields of APIs whose streams can include llama-server's times (`StreamTimings`)."""

    return_progress: bool | None = None
    """With `stream`: events with `prompt_progress`, when the request is admitted and after each step that computes part
    of its prompt."""
    timings_per_token: bool | None = None
    """With `stream`: `timings` in each event with tokens, not only in the last one."""

    @property
    def usage_events(self) -> UsageEvents:
        """Which events have `usage`: all for per-token timings, those of the prefill for progress."""
        if self.stream and self.timings_per_token:
            return "all"
        return "prefill" if self.stream and self.return_progress else "end"


class SingleChoiceFields(TimingFields, kw_only=True):
    """Fields of APIs whose responses have a single choice."""

    @property
    def n_candidates(self) -> int:
        """Always 1. Raises `InvalidRequest` for another `n` or `best_of`."""
        for field in ("n", "best_of"):
            if (given := getattr(self, field)) not in (None, 1):
                raise InvalidRequest(field, f"is {given}; this API returns a single answer per request")
        return 1


_NO_OPTIONS = ("id", "prompt", "params")
"""Fields of `GenerationRequest` without a corresponding request field."""


def scales_by_number(lora: list[LoraScale]) -> dict[int, float]:
    """{adapter index: scale}. Raises `InvalidRequest` for duplicate adapters."""
    scales: dict[int, float] = {}
    for i, entry in enumerate(lora):
        if entry.id in scales:
            raise InvalidRequest(f"lora[{i}].id", f"is {entry.id}, which is already in the list")
        scales[entry.id] = entry.scale
    return scales


def _count(field: str, given: int | None) -> int:
    n = 1 if given is None else given
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(field, f"is {n}; it must be from 1 to {MAX_CHOICES}")
    return n


_SYNONYMS: list[Set[str]] = [
    CONSTRAINTS,
    {"max_tokens", "max_completion_tokens", "max_output_tokens"},
    {"speculate", "speculative.n_max"},
    *({ours, theirs} for ours, theirs in SamplingFields._ALIASES.items()),
]
"""Fields that replace each other in `merge_fields`."""


def merge_fields(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The fields of a batch item, as decoded JSON: its own, plus those shared by all items.

    An item's field replaces all shared fields with the same meaning: `repeat_penalty` replaces `repetition_penalty`.
    """
    replaced = set(own) | {name for same in _SYNONYMS if not same.isdisjoint(own) for name in same}
    return {name: value for name, value in shared.items() if name not in replaced} | own
