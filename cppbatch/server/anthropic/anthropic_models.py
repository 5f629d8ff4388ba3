"""`GET /v1/models` in the form of Anthropic's API, for requests with the header `anthropic-version`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Literal

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.server.serving import Serving


class AnthropicModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query string of `GET /v1/models`. Only Anthropic's clients need it."""

    before_id: str = ""
    """Lists the models before this one."""
    after_id: str = ""
    """Lists the models after this one."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as in Anthropic's API."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    """The name of the file without its ending."""
    created_at: str
    """When the server started (RFC 3339)."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    """The maximum number of tokens of prompt and completion together."""
    max_tokens: int
    """The maximum of `max_tokens`."""


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of models."""

    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def anthropic_model(serving: Serving) -> AnthropicModel:
    """The loaded model."""
    most = serving.info.max_sequence
    started = datetime.fromtimestamp(serving.started, timezone.utc)
    return AnthropicModel(
        id=serving.name,
        display_name=serving.info.name,
        created_at=started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=most,
        max_tokens=min(serving.limits.max_tokens or most, most),
    )


def anthropic_model_list(serving: Serving, query: AnthropicModelQuery) -> AnthropicModelList:
    """The page that the query asks for: the loaded model, or nothing before and after it.

    Raises `InvalidRequest` for a cursor that is no name of the model.
    """
    model = anthropic_model(serving)
    for name in ("before_id", "after_id"):
        if cursor := getattr(query, name):
            if cursor != model.id:
                raise InvalidRequest(name, f"is {cursor!r}; the only model here is {model.id!r}")
            return AnthropicModelList(data=[], first_id=None, last_id=None)
    return AnthropicModelList(data=[model], first_id=model.id, last_id=model.id)
