"""The shapes of llama-server's answers, for the OpenAPI document; `replies` and `routes` make them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class LlamaTimings(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a text was. Prompt tokens from the prefix cache are counted apart."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /completion`, of one text, not streamed."""

    index: int
    content: str
    tokens: list[int]
    """With `return_tokens`."""
    id_slot: int
    """-1: requests have no slots of their own."""
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    """Of the prompt."""
    generation_settings: dict[str, Any]
    prompt: str
    """As the model got it."""
    has_new_line: bool
    truncated: bool
    """The context was full."""
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    """Of prompt and text, those whose keys and values are there for the next request."""
    timings: LlamaTimings
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET
    """With `n_probs`."""


class TokenAndPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its text, or its bytes where they are no whole character."""

    id: int
    piece: str | list[int]


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`."""

    tokens: list[int | TokenAndPiece]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    content: str


class TemplateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /apply-template`."""

    prompt: str


class DefaultSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is done unless a request says otherwise."""

    params: dict[str, Any]
    n_ctx: int
    """Most tokens of prompt and answer together."""


class Modalities(msgspec.Struct, frozen=True, kw_only=True):
    """What can be read beside text."""

    vision: bool = False
    video: bool = False
    audio: bool = False


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /props`."""

    default_generation_settings: DefaultSettings
    total_slots: int
    """Sequences that run at once, of all workers."""
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    endpoint_slots: bool = True
    endpoint_props: bool = False
    """They cannot be changed."""
    endpoint_metrics: bool = True
    is_sleeping: bool = False


class LoraAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /lora-adapters`."""

    id: int
    name: str
    path: str
    scale: float
    """Of requests that do not say."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /slots`."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False
