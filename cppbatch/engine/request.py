"""What goes into the engine and what comes out: requests, their parameters, events, results."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from cppbatch.errors import InvalidRequest

_INT32_MAX = 2**31 - 1
_LONGEST_TIMEOUT = 30 * 24 * 3600  # seconds
_GREEDY_BELOW = 1e-3  # dividing logits by less would overflow float32


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    """The model ended its text, or a stop string or stop token came."""
    LENGTH = "length"
    """`max_tokens` were generated, or the context is full."""
    TIMEOUT = "timeout"
    """The request's `timeout` or `queue_timeout` has passed; the text so far is there."""
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one completion is generated. Defaults are llama.cpp's. Raises `InvalidRequest` naming the bad field."""

    max_tokens: int | None = None
    """Most tokens to generate; None: until the model ends the text or the context is full."""
    temperature: float = 0.8
    """0 (anything below 0.001) takes the likeliest token every time: greedy."""
    top_k: int = 40
    """Sample among the k likeliest tokens; 0: all."""
    top_p: float = 0.95
    """Sample among the likeliest tokens whose probabilities sum to this; 1: all."""
    min_p: float = 0.05
    """Drop tokens less than this times as likely as the likeliest; 0: none."""
    seed: int | None = None
    """Same seed, same text, whatever else is in the batch (but for ties in the last bits of a float); None, or -1 as
    in llama.cpp: fresh entropy."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, if negative) the logits of recent tokens; 1: off."""
    presence_penalty: float = 0.0
    """Taken from the logit of every recent token, once; -2 to 2 as in OpenAI's API."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a recent token for each of its occurrences; -2 to 2."""
    penalty_last_n: int = 64
    """How many tokens, prompt included, count as recent for the three penalties."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it. A single string may be given."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text besides the model's own."""
    ignore_eos: bool = False
    """Never let the model end the text itself."""
    min_tokens: int = 0
    """Do not let the model end the text, nor take a stop token, before this many tokens."""

    def __post_init__(self) -> None:
        _set_tuple(self, "stop", str, "a string or a list of strings")
        _set_tuple(self, "stop_token_ids", int, "a list of token ids")
        if self.max_tokens is not None:
            _number(self, "max_tokens", 1, _INT32_MAX, integer=True)
        if self.seed is not None:
            _number(self, "seed", -(2**63), 2**64 - 1, integer=True)
        _number(self, "temperature", 0, 100)
        _number(self, "top_k", 0, _INT32_MAX, integer=True)
        _number(self, "top_p", 0, 1)
        _number(self, "min_p", 0, 1)
        _number(self, "repetition_penalty", 0.01, 100)
        _number(self, "presence_penalty", -2, 2)
        _number(self, "frequency_penalty", -2, 2)
        _number(self, "penalty_last_n", 0, _INT32_MAX, integer=True)
        _number(self, "min_tokens", 0, _INT32_MAX, integer=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if "" in self.stop:
            raise InvalidRequest("stop", "has an empty string, which every text contains")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, with no randomness."""
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether recent tokens change the logits."""
        wanted = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return wanted and self.penalty_last_n > 0


def _set_tuple(params: SamplingParams, name: str, kind: type, wanted: str) -> None:
    value = getattr(params, name)
    items = (value,) if isinstance(value, kind) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        raise InvalidRequest(name, f"is {value!r}; it must be {wanted}")
    msgspec.structs.force_setattr(params, name, items)


def _instance(request: msgspec.Struct, name: str, kind: type, wanted: str) -> None:
    value = getattr(request, name)
    if not isinstance(value, kind):
        raise InvalidRequest(name, f"is {value!r}; it must be {wanted}")


def _number(params: msgspec.Struct, name: str, low: float, high: float, *, integer: bool = False) -> None:
    value = getattr(params, name)
    if not isinstance(value, int if integer else (int, float)) or isinstance(value, bool):
        raise InvalidRequest(name, f"is {value!r}; it must be {'a whole number' if integer else 'a number'}")
    if not low <= value <= high:  # also false for NaN
        raise InvalidRequest(name, f"is {value}; it must be from {low} to {high}")


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued. Raises `InvalidRequest` naming the bad field."""

    id: str
    """Names the request in events; unique among those that run."""
    prompt: str | list[int]
    """Text, or token ids that are used as they are."""
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs first, -100 to 100. Every 10 seconds of waiting make up for one, so nobody starves."""
    timeout: float | None = None
    """Seconds from arrival to the end at most; None: no limit."""
    queue_timeout: float | None = None
    """Seconds to wait at most before it first runs."""
    cache_prompt: bool = True
    """Take the beginning of the prompt from the prefix cache, and leave this one there for others."""
    cache_salt: str = ""
    """Requests of different salts never share a prefix (whether one is cached can be seen in the time it takes)."""

    def __post_init__(self) -> None:
        _number(self, "priority", -100, 100, integer=True)
        for name in ("timeout", "queue_timeout"):
            if getattr(self, name) is not None:
                _number(self, name, 0, _LONGEST_TIMEOUT)
        _instance(self, "cache_prompt", bool, "true or false")
        _instance(self, "cache_salt", str, "a string")


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished request used. Times in seconds."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were not computed, but taken from the prefix cache."""
    completion_tokens: int
    queue_seconds: float
    """From arrival to admission."""
    first_token_seconds: float
    """From arrival to the first token (TTFT); 0 if there was none."""
    total_seconds: float
    """From arrival to the end."""


class GenerationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request: new text, and in its last event how it ended."""

    request_id: str
    text: str = ""
    """New text; only whole characters, and never part of a stop string."""
    tokens: list[int] = []
    """New token ids: those of a stop string too, but not an end or stop token."""
    finish_reason: FinishReason | None = None
    """Set in the last event, and only there."""
    usage: Usage | None = None
    """Set in the last event."""
    error: str | None = None
    """What went wrong, when the finish reason is `error`."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole result of `BatchInferenceEngine.generate`."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    usage: Usage
    error: str | None = None
