"""The bodies of `/generate` and `/generate/batch`. Unknown fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.server.sampling_fields import SamplingFields


class GenerateFields(SamplingFields, kw_only=True):
    """What both have beside the prompts."""

    logprobs: int | None = None
    """Log-probabilities of the tokens taken, and of this many (to 20) of the likeliest at each place."""
    echo: bool | None = None
    """Begin the text with the prompt."""

    def check_one_text(self) -> None:
        """Raises `InvalidRequest` when several texts of one prompt are asked for: there is one to a result."""
        for name in ("n", "best_of"):
            if getattr(self, name) not in (None, 1):
                message = "must be 1 here: for several texts of one prompt give /generate/batch several `params`"
                raise InvalidRequest(name, message)


class GenerateRequest(GenerateFields, kw_only=True):
    """`POST /generate`, and what every item of a batch comes to."""

    prompt: str | list[int]
    """Text, or token ids that are used as they are."""


class BatchRequest(GenerateFields, kw_only=True):
    """`POST /generate/batch`: `prompts`, or one `prompt` with several `params`. All other fields are for every item."""

    prompts: list[Any] | None = None
    """Each a text, a list of token ids, or an object with a `prompt` and fields of its own, which win."""
    prompt: str | list[int] | None = None
    settings: list[Any] | None = msgspec.field(default=None, name="params")
    """Objects of fields, each for one text of `prompt`."""
