"""The bodies of llama-server's requests. Unknown fields, and those of which this server has no use, are ignored."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from cppbatch.server.sampling_fields import SamplingFields

Json = dict[str, Any]


class LlamaFields(SamplingFields, kw_only=True):
    """The fields of `/completion` and `/infill`, but for the prompt.

    Of no use here: `n_keep`, `n_discard`, `n_cache_reuse` (no text is ever shifted out of the context), `id_slot` (any
    request finds any cached prefix) and `return_progress`.
    """

    _ALIASES: ClassVar[dict[str, str]] = {
        **SamplingFields._ALIASES,
        "max_tokens": "n_predict",
        "logprobs": "n_probs",
    }

    n_predict: int | None = None
    """Most tokens to generate. -1: until the model ends its text or the context is full; 0: none, but the prompt is
    computed for later requests."""
    n_cmpl: int | None = None
    """Texts of each prompt."""
    n_probs: int | None = None
    """Show the log-probabilities of so many of the likeliest tokens, to 20."""
    post_sampling_probs: bool | None = None
    """Must not be true."""
    min_keep: int | None = None
    """Must not be more than 1."""
    n_indent: int | None = None
    """Must not be more than 0."""
    t_max_predict_ms: float | None = None
    """Milliseconds from the first token after which the next line's end also ends the text; 0 or less: no limit."""
    return_tokens: bool | None = None
    """Show the generated ids; a stream always does."""
    timings_per_token: bool | None = None
    """Each event of a stream says how fast the text comes."""
    response_fields: list[str] | None = None
    """Show only these fields; `a/b` is the b of a."""
    samplers: list[str] | str | None = None  # type: ignore[assignment]
    """By llama-server's names, or as one string with a letter for each."""
    logit_bias: dict[str, Any] | list[Any] | None = None  # type: ignore[assignment]
    """An object, or pairs of a token id or a text with a bias; false in place of a bias: never."""

    @property
    def clamps_max_tokens(self) -> bool:
        """Always: as on llama-server, a text ends where the context is full."""
        return True


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """`POST /completion`."""

    prompt: str | list[Any] | Json
    """A text, token ids, both mixed, or a list of any of these; `{"prompt_string": ...}` in place of a text."""


class ExtraText(msgspec.Struct):
    """A text for context, such as another file of the project."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaFields, kw_only=True):
    """`POST /infill`."""

    input_prefix: str
    """What stands before the cursor."""
    input_suffix: str
    """What stands after it."""
    prompt: str = ""
    """What the text has to begin with."""
    input_extra: list[ExtraText] | None = None


class TokenizeRequest(msgspec.Struct):
    """`POST /tokenize`."""

    content: str | list[str | int] = ""
    """A text, or texts and token ids mixed."""
    add_special: bool = False
    """Begin with BOS where the model wants it."""
    parse_special: bool = True
    """Read control tokens as such."""
    with_pieces: bool = False


class DetokenizeRequest(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[int] = []
