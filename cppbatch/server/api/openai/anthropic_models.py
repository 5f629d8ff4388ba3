"""`GET /v1/models` in Anthropic's format, for requests with the header `anthropic-version`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Annotated, Literal

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.server.models.served import ModelEntry


class AnthropicModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query string of `GET /v1/models`, used by Anthropic's clients."""

    before_id: str = ""
    """List the models before this one."""
    after_id: str = ""
    """List the models after this one."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as in Anthropic's API."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    """The file name without its extension."""
    created_at: str
    """When the server started (RFC 3339)."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    """Maximum tokens of prompt and completion together."""
    max_tokens: int
    """The maximum value of `max_tokens`."""


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of models."""

    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def anthropic_model(entry: ModelEntry, started: int) -> AnthropicModel:
    """A model of a server started at this time (seconds since 1970)."""
    most = entry.max_sequence
    return AnthropicModel(
        id=entry.name,
        display_name=entry.path.stem,
        created_at=datetime.fromtimestamp(started, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=most,
        max_tokens=min(entry.settings.limits.max_tokens or most, most),
    )


def anthropic_model_list(entries: Sequence[ModelEntry], started: int, query: AnthropicModelQuery) -> AnthropicModelList:
    """The requested page.

    Raises `InvalidRequest` for a cursor that is not in the list.
    """
    names = [entry.name for entry in entries]

    def position(field: str, cursor: str) -> int:
        if cursor not in names:
            raise InvalidRequest(
                field,
                f"is {cursor!r}, which is not a model of this server; available: "
                f"{', '.join(map(repr, names)) or 'none'}",
            )
        return names.index(cursor)

    first = position("after_id", query.after_id) + 1 if query.after_id else 0
    end = position("before_id", query.before_id) if query.before_id else len(names)
    if query.before_id and not query.after_id:
        first = max(0, end - query.limit)
    page = entries[first : min(end, first + query.limit)]
    return AnthropicModelList(
        data=[anthropic_model(entry, started) for entry in page],
        has_more=first > 0 if query.before_id else first + len(page) < end,
        first_id=page[0].name if page else None,
        last_id=page[-1].name if page else None,
    )
