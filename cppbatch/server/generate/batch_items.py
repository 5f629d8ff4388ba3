"""The items of a `/generate/batch`. Each is validated by itself, so that an invalid one fails alone."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.server.generate.generate_endpoint import GenerateFields, GenerateRequest
from cppbatch.server.limits import Limits
from cppbatch.server.parse import convert
from cppbatch.server.sampling_fields import merge_fields
from cppbatch.server.unknown_fields import refuse_unknown

Json = dict[str, Any]

_BATCH_ONLY = ("stream", "stream_options")
"""Fields that an item must not have."""


class GenerateBatchRequest(GenerateFields, kw_only=True):
    """The body of `POST /generate/batch`: `prompts`, or one `prompt` with several `params`. All other fields apply to
    every item."""

    prompts: list[Any] | None = None
    """Each is a text, a list of token ids, or an object with a `prompt` and fields that override those of the body."""
    prompt: str | list[int] | None = None
    settings: list[Any] | None = msgspec.field(default=None, name="params")
    """Objects with fields, each for one completion of `prompt`."""


class BatchItem:
    """One item, not validated yet."""

    def __init__(self, item: object, path: str, shared: Json) -> None:
        """`item` is the JSON at `path` of the body. `shared`: the fields of all items, with the prompt if all items
        have the same."""
        self._item, self._path, self._shared = item, path, shared

    def body(self) -> GenerateRequest:
        """The item's fields, merged with the shared ones. Raises `InvalidRequest`."""
        own = self._item if isinstance(self._item, dict) else {"prompt": self._item}
        if own is not self._item and "prompt" in self._shared:
            raise InvalidRequest(self._path, f"is {self._item!r:.80}; it must be an object of sampling fields")
        for name in _BATCH_ONLY:
            if own.get(name):
                raise InvalidRequest(name, "is for a whole batch, not for one of its items")
        body = convert(merge_fields(self._shared, own), GenerateRequest)
        refuse_unknown(own, GenerateRequest)
        body.check_single_completion()
        return body

    def field_name(self, field: str) -> str:
        """The name of a field in the body, within the item if the item has the field."""
        root = re.split(r"[.\[]", field, maxsplit=1)[0]
        is_prompt = root == "prompt" and "prompt" not in self._shared
        if isinstance(self._item, dict):
            return f"{self._path}.{field}" if root in self._item or is_prompt else field
        return self._path + field.removeprefix("prompt") if is_prompt else field


def batch_items(body: GenerateBatchRequest, limits: Limits) -> list[BatchItem]:
    """The items of a batch. Raises `InvalidRequest` if there are none, or too many."""
    if (body.prompts is None) == (body.prompt is None):
        raise InvalidRequest("prompts", "is required, or one `prompt` with several `params`; not both")
    if body.settings is not None and body.prompt is None:
        raise InvalidRequest("params", "is for one `prompt`; items of `prompts` may be objects with their own fields")
    field, items = ("params", body.settings) if body.prompts is None else ("prompts", body.prompts)
    if not items:
        raise InvalidRequest(field, "is required and must not be empty")
    if len(items) > (most := limits.max_prompts_per_batch):
        raise InvalidRequest(field, f"has {len(items)} items; this server takes {most} (--max-prompts-per-batch)")
    shared = {
        name: value
        for name, value in msgspec.to_builtins(body).items()
        if value is not None and name not in ("prompts", "params", *_BATCH_ONLY)
    }
    return [BatchItem(item, f"{field}[{i}]", shared) for i, item in enumerate(items)]
