"""What goes into the engine and what comes out: requests, events, results."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal, TypedDict, get_args

import msgspec

from cppbatch.config import MOST_LORA_SCALE
from cppbatch.engine.params import INT32_MAX, SamplingParams, instance, number, shown, token_ids
from cppbatch.errors import InvalidRequest

_LONGEST_TIMEOUT = 30 * 24 * 3600  # seconds

OPTION_RANGES = {
    "priority": (-100, 100),
    "timeout": (0, _LONGEST_TIMEOUT),
    "queue_timeout": (0, _LONGEST_TIMEOUT),
}
"""What numbers `GenerationRequest` takes, but for the params'."""

BACKGROUND = OPTION_RANGES["priority"][1]
"""The lowest priority, for work that nobody sits and waits for."""


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


class Pair(msgspec.Struct, frozen=True):
    """Two texts for a reranker, which says how well the document answers the query."""

    query: str
    document: str


Prompt = str | list[int] | Pair
"""Text; token ids, which are used as they are; or what a reranker compares."""

_LONGEST_NAME = 1024  # letters
_MOST_ADAPTERS = 1024
_LONG = 1 << 15  # characters, or token ids


def is_long(prompt: Prompt) -> bool:
    """Whether preparing it takes so long that nobody should wait behind it."""
    return (len(prompt.query) + len(prompt.document) if isinstance(prompt, Pair) else len(prompt)) > _LONG


Task = Literal["generate", "embed"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued, or to be made a vector of. Raises `InvalidRequest` naming the bad field."""

    id: str
    """Names the request in events; unique among those that run."""
    prompt: Prompt
    task: Task = "generate"
    """What the loaded model does: "embed" if `ModelInfo.pooling` is set, else "generate". An embedding request has one
    event, its last, with the `embedding`; `params`, `cache_prompt` and `cache_salt` do not matter to it."""
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs first, -100 to 100. Every 10 seconds of waiting make up for one, so nobody starves.

    100 is for work in the background: it takes what room others leave, and stands still while one of them that ranks
    before it waits for its first token."""
    timeout: float | None = None
    """Seconds from arrival to the end at most; None: no limit."""
    queue_timeout: float | None = None
    """Seconds to wait at most before it first runs."""
    fit: bool = False
    """Fewer than `max_tokens` where the context holds no more after the prompt; else that is refused."""
    cache_prompt: bool = True
    """Take the beginning of the prompt from the prefix cache, and leave this one there for others."""
    cache_salt: str = ""
    """Requests of different salts never share a prefix (whether one is cached can be seen in the time it takes)."""
    lora: dict[str | int, float] | None = None
    """LoRA adapters by name, or by their place from 0, with scales; those left out are off. None: as the engine was
    started (--lora)."""

    def __post_init__(self) -> None:
        if isinstance(self.prompt, list):
            msgspec.structs.force_setattr(self, "prompt", token_ids("prompt", self.prompt))
        elif not isinstance(self.prompt, (str, Pair)):
            raise InvalidRequest("prompt", f"is {shown(self.prompt)}; it must be a string or a list of token ids")
        number(self, "priority", *OPTION_RANGES["priority"], integer=True)
        for name in ("timeout", "queue_timeout"):
            if getattr(self, name) is not None:
                number(self, name, *OPTION_RANGES[name])
        for name in ("fit", "cache_prompt"):
            instance(self, name, bool, "true or false")
        if self.task not in get_args(Task):
            raise InvalidRequest("task", f"is {self.task!r}; it must be one of {', '.join(get_args(Task))}")
        instance(self, "cache_salt", str, "a string")
        if len(self.cache_salt) > _LONGEST_NAME:
            raise InvalidRequest("cache_salt", f"has {len(self.cache_salt):,} letters; {_LONGEST_NAME} may be")
        if self.lora is not None:
            self._check_lora(self.lora)

    @staticmethod
    def _check_lora(lora: object) -> None:
        """Whether there are such adapters is for the engine to say."""
        if not isinstance(lora, Mapping):
            raise InvalidRequest("lora", f"is {shown(lora)}; it must be an object of adapters and scales")
        if len(lora) > _MOST_ADAPTERS or any(isinstance(key, str) and len(key) > _LONGEST_NAME for key in lora):
            raise InvalidRequest(
                "lora", f"has more than {_MOST_ADAPTERS} adapters, or a name of {_LONGEST_NAME} letters"
            )
        for key, scale in lora.items():
            if isinstance(key, bool) or not (isinstance(key, str) or (isinstance(key, int) and 0 <= key <= INT32_MAX)):
                raise InvalidRequest(
                    "lora", f"has the key {shown(key)}; keys are an adapter's name, or its number from 0"
                )
            if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= MOST_LORA_SCALE:
                message = f"it must be from {-MOST_LORA_SCALE:g} to {MOST_LORA_SCALE:g}"
                raise InvalidRequest("lora", f"is {shown(scale)} for {shown(key)}; {message}")


class RequestOptions(TypedDict, total=False):
    """Fields of `GenerationRequest` that `BatchInferenceEngine` takes as keyword arguments."""

    priority: int
    timeout: float | None
    queue_timeout: float | None
    fit: bool
    cache_prompt: bool
    cache_salt: str
    lora: dict[str | int, float] | None


class ResumeState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a request had come in an engine that is gone, so that another one can go on from there. In seconds."""

    tokens: list[int]
    """Those its events have told."""
    age: float
    """Since it arrived."""
    first_token_seconds: float
    """From arrival to the first token; how long it had waited before that is not known any more."""


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
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


class TokenPiece(msgspec.Struct, frozen=True):
    """A token of a text."""

    id: int
    piece: bytes
    """Its bytes: perhaps half a character; control tokens as they are written."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its log-probability (natural logarithm)."""

    token: int
    piece: bytes
    """Its bytes: perhaps half a character; control tokens as they are written."""
    logprob: float | None
    """None for the first token of a prompt, of which the model says nothing."""
    top: list[tuple[int, bytes, float]] = []
    """The likeliest tokens there, the likeliest first: id, bytes, log-probability."""
    text_offset: int = 0
    """Characters of the text before it, those of an echoed prompt too."""


class GenerationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request: new text, and in its last event how it ended."""

    request_id: str
    text: str = ""
    """New text; only whole characters, and never part of a stop string."""
    tokens: list[int] = []
    """New token ids: those of a stop string too, but not an end or stop token."""
    logprobs: list[TokenLogprob] = []
    """Of the new tokens, if the request asks for it; with `echo`, the prompt's come first."""
    embedding: bytes | None = None
    """The vector of an embedding request that ended with `stop`: `ModelInfo.n_embd` numbers, float32 little-endian, as
    llama.cpp pools them, not normalised. Of a reranker its scores as they are, the first of which is the relevance.
    `cppbatch.engine.embeddings` reads it."""
    finish_reason: FinishReason | None = None
    """Set in the last event, and only there."""
    stop: str | None = None
    """Set in the last event, if a stop string has come: which one."""
    seed: int | None = None
    """Set in the last event: the seed that was used, with which the text can be had again."""
    usage: RequestUsage | None = None
    """Set in the last event."""
    error: str | None = None
    """What went wrong, when the finish reason is `error`."""
    error_field: str | None = None
    """The field of the request that is to blame for it; None: the engine is."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole result of `BatchInferenceEngine.generate`."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    usage: RequestUsage
    seed: int
    """With which the text can be had again."""
    logprobs: list[TokenLogprob] = []
    """If the params ask for it; with `echo`, the prompt's come first."""
    error: str | None = None


class Mapped(msgspec.Struct, frozen=True):
    """A result of `BatchInferenceEngine.map`."""

    index: int
    """The prompt's place in the iterable, from 0."""
    prompt: Prompt
    completion: Completion
    """With the finish reason `error` for a prompt that cannot run; its `error` then begins with the field at fault."""
