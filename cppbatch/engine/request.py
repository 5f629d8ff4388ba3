"""The engine's input and output: requests, events, results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Literal, TypedDict, get_args

import msgspec

from cppbatch.chat.media_parts import PlainText
from cppbatch.engine.params import SamplingParams, format_value, instance, number, replace_fields, token_ids
from cppbatch.errors import ContextOverflow, InvalidRequest
from cppbatch.model_changes import MOST_SCALE
from cppbatch.setting import INT32_MAX

_MAX_TIMEOUT = 30 * 24 * 3600  # seconds

OPTION_RANGES = {
    "priority": (-100, 100),
    "timeout": (0, _MAX_TIMEOUT),
    "queue_timeout": (0, _MAX_TIMEOUT),
    "n_keep": (-1, INT32_MAX),
    "id_slot": (-1, INT32_MAX),
    "n_discard": (0, INT32_MAX),
}
"""Ranges of the numeric fields of `GenerationRequest`, except its params."""
_IN_SECONDS = ("timeout", "queue_timeout")
_OPTIONAL = (*_IN_SECONDS, "n_keep")

BACKGROUND = OPTION_RANGES["priority"][1]
"""The lowest priority: for work that no client is waiting for."""


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    """The model ended the text, or a stop string or a stop token was generated."""
    LENGTH = "length"
    """`max_tokens` were generated, or the context is full."""
    TIMEOUT = "timeout"
    """The request's `timeout` or `queue_timeout` expired. The text so far is returned."""
    CANCELLED = "cancelled"
    ERROR = "error"


class Pair(msgspec.Struct, frozen=True, tag=True):
    """Two texts for a reranker, which scores how well the document answers the query."""

    query: str
    document: str


Modality = Literal["image", "audio"]


class Media(msgspec.Struct, frozen=True, dict=True, tag=True):
    """An image or audio clip in a prompt.

    Media("image", Path("cat.jpg").read_bytes())
    """

    kind: Modality
    data: bytes
    """The contents of the file: PNG, JPEG, WebP, GIF or BMP for an image; WAV, MP3 or FLAC for audio."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Modality):
            raise InvalidRequest("prompt", f"has media of kind {format_value(self.kind)}; it must be image or audio")
        if not isinstance(self.data, bytes):
            raise InvalidRequest(
                "prompt", f"has {format_value(self.data)} as {self.kind} data; it must be the bytes of a file"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, in hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()


class MediaPrompt(msgspec.Struct, frozen=True, tag=True):
    """Text interleaved with images and audio, for a model with a projector (`EngineConfig.mmproj`), and with texts in
    which control tokens are plain text.

        MediaPrompt(["What is this? ", Media("image", data), "\n"])
        MediaPrompt(["<|im_start|>user\n", PlainText("What does <|im_end|> mean?"), "<|im_end|>\n"])

    The other texts may contain control tokens, and BOS comes first if the model uses it, as in a text prompt.
    Consecutive texts are joined. The last part must be a text: only a text token predicts the next one.
    """

    parts: Sequence[str | PlainText | Media]

    def __post_init__(self) -> None:
        kinds = str | PlainText | Media
        if not isinstance(self.parts, list) or not all(isinstance(part, kinds) for part in self.parts):
            message = "its parts must be a list of strings, `PlainText` and `Media` objects"
            raise InvalidRequest("prompt", f"is {format_value(self.parts)}; {message}")

    @property
    def media(self) -> list[Media]:
        """The images and audio, in order."""
        return [part for part in self.parts if isinstance(part, Media)]

    @property
    def text(self) -> str:
        """The texts, joined."""
        return "".join(map(text_of_part, self.parts))


def text_of_part(part: str | PlainText | Media) -> str:
    """The text of a part of a `MediaPrompt`; "" for an image or audio clip."""
    return part if isinstance(part, str) else part.text if isinstance(part, PlainText) else ""


Prompt = str | list[int] | Pair | MediaPrompt
"""A text; token ids, which are used unchanged; a pair of texts for a reranker; or text with images and audio."""

_MAX_NAME = 1024  # characters
_MAX_ADAPTERS = 1024


def is_long(prompt: Prompt) -> bool:
    """Whether it takes too long to prepare for short prompts to wait."""
    if isinstance(prompt, MediaPrompt):
        return bool(prompt.media) or is_long(prompt.text)  # images and audio are encoded
    return (len(prompt.query) + len(prompt.document) if isinstance(prompt, Pair) else len(prompt)) > 1 << 15


Task = Literal["generate", "embed"]

UsageEvents = Literal["end", "prefill", "all"]
"""Which events of a request have `usage`: the last one; also those of its prefill; or all."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue or to embed. Raises `InvalidRequest` naming the invalid field."""

    id: str
    """The id in events; unique among waiting and running requests."""
    prompt: Prompt
    task: Task = "generate"
    """"embed" if `ModelInfo.pooling` is set, else "generate"; otherwise the request is refused. An embedding request
    has one event, with the `embedding`, and ignores `params`, `cache_prompt` and `cache_salt`."""
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    priority: int = 0
    """-100 to 100; lower runs first. Ten seconds of waiting count as much as 1, so no request starves.

    100 is for background work: it uses free capacity, and pauses while another request of earlier rank waits for its
    first token."""
    timeout: float | None = None
    """Seconds after arrival at which the request ends; None: no limit."""
    queue_timeout: float | None = None
    """Seconds after arrival at which the request ends if it has not started; None: no limit."""
    clamp_max_tokens: bool = False
    """Clamp `max_tokens` to the context remaining after the prompt. False: refuse a request that does not fit."""
    cache_prompt: bool = True
    """Reuse a prefix from the prefix cache, and keep this request's tokens there for others."""
    cache_salt: str = ""
    """Requests with different salts never share a prefix, so that timing does not reveal cached prefixes to others."""
    id_slot: int = -1
    """A number for the request's cached prefix, by which it can be saved to a file or erased. Later requests with this
    slot prefer that prefix. -1: no slot."""
    n_keep: int | None = None
    """With context shifts: initial tokens, not counting BOS, to keep when the context is full; -1: the prompt. None:
    `EngineConfig.n_keep`."""
    n_discard: int = 0
    """With context shifts: number of tokens after those to drop; 0: half of them."""
    prediction: str | list[int] | None = None
    """Text or token ids that the completion will probably contain: a source of drafts. Does not change the
    completion."""
    lora: dict[str | int, float] | None = None
    """LoRA adapters by name or index (from 0), with their scales; others are off. None: the scales of --lora."""
    control_vectors: dict[str | int, float] | None = None
    """Control vectors by name or index (from 0), with their scales; others are off. None: the scales of
    --control-vector."""
    usage_events: UsageEvents = "end"
    """Which events have `usage`. Unless "end", there are also events without tokens: on admission, and after each step
    that computes part of the prompt."""
    client: str = ""
    """Whose request it is. Waiting requests of several clients take turns; those of "" are in order of arrival."""
    report_acceptance: bool = False
    """For an `EngineClient`: an empty event (`GenerationEvent.is_acceptance`) as soon as the request is known to be
    valid, before it waits in the queue."""

    def __post_init__(self) -> None:
        if isinstance(self.prompt, list):
            msgspec.structs.force_setattr(self, "prompt", token_ids("prompt", self.prompt))
        elif not isinstance(self.prompt, (str, Pair, MediaPrompt)):
            raise InvalidRequest(
                "prompt", f"is {format_value(self.prompt)}; it must be a string or a list of token ids"
            )
        for name, (low, high) in OPTION_RANGES.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                number(self, name, low, high, integer=name not in _IN_SECONDS)
        for name in ("clamp_max_tokens", "cache_prompt"):
            instance(self, name, bool, "true or false")
        if self.task not in get_args(Task):
            raise InvalidRequest("task", f"is {self.task!r}; it must be one of {', '.join(get_args(Task))}")
        if self.usage_events not in get_args(UsageEvents):
            names = ", ".join(get_args(UsageEvents))
            raise InvalidRequest("usage_events", f"is {format_value(self.usage_events)}; it must be one of {names}")
        instance(self, "cache_salt", str, "a string")
        if len(self.cache_salt) > _MAX_NAME:
            raise InvalidRequest("cache_salt", f"has {len(self.cache_salt):,} characters; the limit is {_MAX_NAME}")
        if isinstance(self.prediction, list):
            msgspec.structs.force_setattr(self, "prediction", token_ids("prediction", self.prediction))
        elif not isinstance(self.prediction, str | None):
            message = f"is {format_value(self.prediction)}; it must be a string or a list of token ids"
            raise InvalidRequest("prediction", message)
        _check_scales("lora", self.lora)
        _check_scales("control_vectors", self.control_vectors)


def _check_scales(field: str, scales: object) -> None:
    """Checks types and ranges, unless it is None. The engine checks whether these adapters exist."""
    if scales is None:
        return
    if not isinstance(scales, Mapping):
        raise InvalidRequest(field, f"is {format_value(scales)}; it must be an object that maps names to scales")
    if len(scales) > _MAX_ADAPTERS or any(isinstance(key, str) and len(key) > _MAX_NAME for key in scales):
        message = f"has more than {_MAX_ADAPTERS} entries, or a name of more than {_MAX_NAME} characters"
        raise InvalidRequest(field, message)
    for key, scale in scales.items():
        if isinstance(key, bool) or not (isinstance(key, str) or (isinstance(key, int) and 0 <= key <= INT32_MAX)):
            message = f"has the key {format_value(key)}; a key must be a name, or a number from 0"
            raise InvalidRequest(field, message)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= MOST_SCALE:
            message = f"it must be from {-MOST_SCALE:g} to {MOST_SCALE:g}"
            raise InvalidRequest(field, f"is {format_value(scale)} for {format_value(key)}; {message}")


class RequestOptions(TypedDict, total=False):
    """Fields of `GenerationRequest` that `BatchInferenceEngine` accepts as keyword arguments."""

    priority: int
    timeout: float | None
    queue_timeout: float | None
    clamp_max_tokens: bool
    cache_prompt: bool
    cache_salt: str
    id_slot: int
    n_keep: int | None
    n_discard: int
    prediction: str | list[int] | None
    lora: dict[str | int, float] | None
    control_vectors: dict[str | int, float] | None
    usage_events: UsageEvents


class ResumeState(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a request in a crashed engine, from which another engine continues. Times in seconds."""

    tokens: list[int]
    """Tokens in the events so far."""
    age: float
    """Time since arrival."""
    first_token_seconds: float
    """Time from arrival to the first token. The admission time is lost."""


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and times of a request so far. Times in seconds."""

    prompt_tokens: int
    n_media_tokens: int = 0
    """Image and audio tokens of the prompt."""
    n_audio_tokens: int = 0
    """Audio tokens of the prompt."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    prefilled_tokens: int = 0
    """Prompt tokens computed or taken from the prefix cache; all of them once there is a token."""
    completion_tokens: int
    """Generated tokens, including an end token."""
    drafted_tokens: int = 0
    """Verified draft tokens (speculative decoding)."""
    accepted_tokens: int = 0
    """Accepted draft tokens; included in the completion tokens."""
    context_shifts: int = 0
    """Number of context shifts; after a shift the output is approximate."""
    queue_seconds: float
    """From arrival to admission."""
    first_token_seconds: float
    """From arrival to the first token (TTFT); 0 without a token."""
    total_seconds: float
    """From arrival to this event; in the last event, the total."""


class TokenPiece(msgspec.Struct, frozen=True):
    """A token with its bytes."""

    id: int
    piece: bytes
    """The token's bytes, possibly part of a character; for a control token, its text."""


def detokenize(tokens: list[TokenPiece]) -> str:
    """The text of tokens, including control tokens."""
    return b"".join(token.piece for token in tokens).decode("utf-8", "replace")


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its log-probability (natural logarithm)."""

    token: int
    piece: bytes
    """The token's bytes, possibly part of a character; for a control token, its text."""
    logprob: float | None
    """None for the first token of a prompt, which is not predicted."""
    top: list[tuple[int, bytes, float]] = []
    """The most likely tokens at this position, most likely first: id, bytes, log-probability."""
    text_offset: int = 0
    """Characters of the text before this token, including an echoed prompt."""


class GenerationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """New text and tokens of a request. The last event also has the finish reason and the usage.

    An event without tokens or finish reason only reports prefill progress, in `usage`.
    """

    request_id: str
    text: str = ""
    """New text: complete characters, without any part of a stop string."""
    tokens: list[int] = []
    """New token ids, including those of a stop string, but not end or stop tokens."""
    token_texts: list[str] = []
    """The text of each of these tokens: together the generated text, including a stop string. A character that spans
    several tokens belongs to the last one; the others have ""."""
    logprobs: list[TokenLogprob] = []
    """For the new tokens, if `params.logprobs` is set; with `echo`, those of the prompt come first."""
    embedding: bytes | None = None
    """The vector of an embedding request that ended with `stop`: `ModelInfo.n_embd` numbers, little-endian float32, as
    pooled by llama.cpp, not normalised. For a reranker: its scores, unchanged; the first one is the relevance. With
    pooling none: that many numbers per prompt token.
    `cppbatch.engine.embeddings` decodes it."""
    finish_reason: FinishReason | None = None
    """Only set in the last event."""
    stop: str | None = None
    """Set in the last event if a stop string ended the text: the stop string."""
    seed: int | None = None
    """Set in the last event: the actual seed, which reproduces the text."""
    usage: RequestUsage | None = None
    """Set in the last event, and in others as requested by `GenerationRequest.usage_events`."""
    error: str | None = None
    """The error message, if the finish reason is `error`."""
    error_field: str | None = None
    """The request field that caused the error; None: the engine failed."""
    overflow: ContextOverflow | None = None
    """Set if the prompt of a request in a list is longer than the context."""

    @property
    def is_report(self) -> bool:
        """Whether the event only reports acceptance, or prefill progress (`GenerationRequest.usage_events`)."""
        return not self.tokens and self.finish_reason is None and (self.usage is not None or self.is_acceptance)

    @property
    def is_acceptance(self) -> bool:
        """Whether the event only reports that the request is valid (`GenerationRequest.report_acceptance`)."""
        return not (self.tokens or self.text or self.logprobs or self.finish_reason or self.usage)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A result of `BatchInferenceEngine.generate`."""

    text: str
    tokens: list[int]
    token_texts: list[str] = []
    """The text of each token, as in `GenerationEvent`."""
    finish_reason: FinishReason
    usage: RequestUsage
    seed: int
    """The actual seed, which reproduces the text."""
    logprobs: list[TokenLogprob] = []
    """If `params.logprobs` is set; with `echo`, those of the prompt come first."""
    error: str | None = None


def completion(events: Sequence[GenerationEvent]) -> Completion:
    """All events of a finished request, as one result."""
    last = events[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    assert last.seed is not None
    return Completion(
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        token_texts=[text for event in events for text in event.token_texts],
        finish_reason=last.finish_reason,
        usage=last.usage,
        seed=last.seed,
        logprobs=[entry for event in events for entry in event.logprobs],
        error=last.error,
    )


class Mapped(msgspec.Struct, frozen=True):
    """A result of `BatchInferenceEngine.map`."""

    index: int
    """The index of the prompt in the iterable, from 0."""
    prompt: Any
    """The prompt as given."""
    completion: Completion
    """For a prompt that cannot run, the finish reason is `error`, and `error` starts with the invalid field."""


def n_candidates(n: int, best_of: int | None) -> int:
    """The number of completions to generate per prompt. Raises `InvalidRequest`."""
    if n < 1:
        raise InvalidRequest("n", f"is {n}; it must be at least 1")
    if best_of is not None and best_of < n:
        raise InvalidRequest("best_of", f"is {best_of}; it must be at least n, which is {n}")
    return best_of or n


def expand(params: list[SamplingParams], n: int, *, ranked: bool) -> list[SamplingParams]:
    """`n` copies of each, in order. `ranked`: add log-probabilities, which `likeliest` needs."""
    if ranked:
        params = [its if its.logprobs is not None else replace_fields(its, logprobs=0) for its in params]
    return [offset_seed(its, i) for its in params for i in range(n)]


def offset_seed(params: SamplingParams, i: int) -> SamplingParams:
    """The params of the i-th completion of a prompt: a given seed becomes seed + i, so that texts differ but are
    reproducible."""
    if i == 0 or params.seed is None or params.seed == -1:
        return params
    return replace_fields(params, seed=(params.seed + i) % 2**64)


def mean_logprob(logprobs: list[TokenLogprob], n_tokens: int) -> float:
    """The mean log-probability of a completion of `n_tokens`; 0 if it has none.

    `logprobs`: those of the completion, after those of the prompt, if any. Tokens that end the reasoning at its budget
    have none.
    """
    own = [entry.logprob or 0.0 for entry in logprobs[max(0, len(logprobs) - n_tokens) :]]
    return sum(own) / len(own) if own else 0.0


def likeliest(completions: list[Completion], n: int, of: int) -> list[Completion]:
    """From each group of `of` completions, the `n` with the highest mean log-probability, best first."""

    def badness(completion: Completion) -> float:
        return -mean_logprob(completion.logprobs, completion.usage.completion_tokens)

    groups = [completions[i : i + of] for i in range(0, len(completions), of)]
    return [best for group in groups for best in sorted(group, key=badness)[:n]]
