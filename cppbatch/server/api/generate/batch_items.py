"""The items of a `/generate/batch`. Each is validated separately: an invalid item does not affect the others."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.server.api.generate.generate_endpoint import (
    GenerateFields,
    GenerateRequest,
)
from cppbatch.server.fields.sampling import merge_fields
from cppbatch.server.fields.unknown import refuse_unknown
from cppbatch.server.http.limits import Limits
from cppbatch.typed_json import convert

Json = dict[str, Any]

_BATCH_ONLY = ("stream", "stream_options", "request_id")
"""Fields that an item must not have."""
_PROMPTS = ("prompt", "messages")
"""Fields of which an item has exactly one."""


class GenerateBatchRequest(GenerateFields, kw_only=True):
    """The body of `POST /generate/batch`: `prompts`; one `prompt` (or `messages`) with several `params`; or `prompts`
    and `params`, combined with each other. All other fields apply to every item."""

    prompts: list[Any] | None = None
    """Each is a text, a list of token ids, or an object with `prompt` or `messages` and fields that override those of
    the body."""
    prompt: str | list[int] | None = None
    settings: list[Any] | None = msgspec.field(default=None, name="params")
    """Objects of sampling fields; each gives one completion of `prompt`, or of every entry of `prompts`."""
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    """An id for `POST /generate/batch/cancel` while the batch runs."""


class BatchItem:
    """One item, not yet validated: JSON from `prompts`, `params` or both, merged with the shared fields."""

    def __init__(self, parts: Sequence[tuple[str, object]], shared: Json) -> None:
        """`parts`: paths in the body and the JSON at each; later parts override fields of earlier ones. `shared`: the
        fields of all items, including the prompt if it is the same for all."""
        self._parts, self._shared = parts, shared

    def body(self) -> GenerateRequest:
        """The item's fields, merged with the shared ones. Raises `InvalidRequest`."""
        merged = self._shared
        for path, json in self._parts:
            own = json if isinstance(json, dict) else {"prompt": json}
            if not merged.keys().isdisjoint(_PROMPTS):
                if own is not json:
                    raise InvalidRequest(path, f"is {json!r:.80}; it must be an object of sampling fields")
                for name in own.keys() & _PROMPTS:
                    raise InvalidRequest(
                        name, "cannot be set here, because it is already given; only sampling fields are allowed"
                    )
            for name in _BATCH_ONLY:
                if own.get(name):
                    raise InvalidRequest(name, "applies to the whole batch and cannot be set for an item")
            merged = merge_fields(merged, own)
        body = convert(merged, GenerateRequest)
        for _, json in self._parts:
            if isinstance(json, dict):
                refuse_unknown(json, GenerateRequest)
        body.check_single_completion()
        return body

    def field_name(self, field: str) -> str:
        """The path of a field in the body, within the part that has it."""
        root = re.split(r"[.\[]", field, maxsplit=1)[0]
        first = self._parts[0][1]
        if root == "prompt" and ("messages" in self._shared or (isinstance(first, dict) and "messages" in first)):
            root = field = "messages"
        for path, json in reversed(self._parts):
            if isinstance(json, dict) and root in json:
                return f"{path}.{field}"
        if root == "prompt" and self._shared.keys().isdisjoint(_PROMPTS):
            path, json = self._parts[0]
            return f"{path}.{field}" if isinstance(json, dict) else path + field.removeprefix("prompt")
        return field


def batch_items(body: GenerateBatchRequest, limits: Limits) -> list[BatchItem]:
    """The items of a batch; in a grid, all settings of the first prompt come first.

    Raises `InvalidRequest` if there are none, or too many.
    """
    if sum(each is not None for each in (body.prompts, body.prompt, body.messages)) != 1:
        message = (
            "is required, unless one `prompt` or `messages` is given with several `params`; give exactly one of "
            "the three"
        )
        raise InvalidRequest("prompts", message)
    lists = {name: json for name, json in (("prompts", body.prompts), ("params", body.settings)) if json is not None}
    for name in lists or ("params",):
        if not lists.get(name):
            raise InvalidRequest(name, "is required and must not be empty")
    n_items, most = math.prod(map(len, lists.values())), limits.max_prompts_per_batch
    if n_items > most:
        counts = " x ".join(str(len(each)) for each in lists.values())
        of = counts if len(lists) == 1 else f"{counts} = {n_items}"
        raise InvalidRequest(
            [*lists][-1], f"makes {of} items; the limit of this server is {most} (--max-prompts-per-batch)"
        )
    shared = {
        name: value
        for name, value in msgspec.to_builtins(body).items()
        if value is not None and name not in ("prompts", "params", *_BATCH_ONLY)
    }
    parts = ([(f"{name}[{i}]", json) for i, json in enumerate(values)] for name, values in lists.items())
    return [BatchItem(item, shared) for item in itertools.product(*parts)]
