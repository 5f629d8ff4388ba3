"""The items of a batch, each checked by itself, so that a bad one fails alone."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.server.generate.schemas import BatchRequest, GenerateRequest
from cppbatch.server.limits import Limits
from cppbatch.server.parse import convert
from cppbatch.server.sampling_fields import merged

Json = dict[str, Any]

_WHOLE = ("stream", "stream_options")
"""Fields that only a whole batch can have."""


class Item:
    """One text of a batch. `own`: what it gives itself, as it stands at `place` of the body."""

    def __init__(self, own: object, place: str, shared: Json) -> None:
        """`shared`: the fields that all items have; with the prompt, when that is one for all."""
        self._own, self._place, self._shared = own, place, shared

    def body(self) -> GenerateRequest:
        """Its fields with those that all have. Raises `InvalidRequest`."""
        own = self._own if isinstance(self._own, dict) else {"prompt": self._own}
        if own is not self._own and "prompt" in self._shared:
            raise InvalidRequest(self._place, f"is {self._own!r:.80}; it must be an object of sampling fields")
        for name in _WHOLE:
            if own.get(name):
                raise InvalidRequest(name, "is for a whole batch, not for one of its items")
        body = convert(merged(self._shared, own), GenerateRequest)
        body.check_one_text()
        return body

    def name(self, field: str) -> str:
        """A field's name as the client has written it: within the item if it stands there."""
        root = re.split(r"[.\[]", field, maxsplit=1)[0]
        is_prompt = root == "prompt" and "prompt" not in self._shared
        if isinstance(self._own, dict):
            return f"{self._place}.{field}" if root in self._own or is_prompt else field
        return self._place + field.removeprefix("prompt") if is_prompt else field


def items_of(body: BatchRequest, limits: Limits) -> list[Item]:
    """The batch's items. Raises `InvalidRequest` when there are none, or too many."""
    if (body.prompts is None) == (body.prompt is None):
        raise InvalidRequest("prompts", "is required, or one `prompt` with several `params`; not both")
    if body.settings is not None and body.prompt is None:
        raise InvalidRequest("params", "is for one `prompt`; items of `prompts` may be objects with their own fields")
    field, entries = ("params", body.settings) if body.prompts is None else ("prompts", body.prompts)
    if not entries:
        raise InvalidRequest(field, "is required and must not be empty")
    if len(entries) > (most := limits.max_prompts_per_batch):
        raise InvalidRequest(field, f"has {len(entries)} items; this server takes {most} (--max-prompts-per-batch)")
    shared: Json = msgspec.to_builtins(body)
    shared = {
        name: value
        for name, value in shared.items()
        if value is not None and name not in ("prompts", "params", *_WHOLE)
    }
    return [Item(entry, f"{field}[{i}]", shared) for i, entry in enumerate(entries)]
