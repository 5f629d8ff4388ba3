"""A route as the OpenAPI document has it."""

from __future__ import annotations

from typing import Any, NamedTuple

from cppbatch.server.api_errors import ErrorResponse

Json = dict[str, Any]

REFS = "#/components/schemas/{name}"
TEXT: Json = {"type": "string"}
_FRAME: Json = {
    "type": "object",
    "description": "With `stream`: a server-sent event. Its data is JSON, or at the end [DONE] where the API has that",
    "properties": {"data": TEXT},
    "required": ["data"],
}
GENERATING = (400, 401, 404, 413, 429, 500, 503)
"""What may become of a request for text, beside success."""
ASKING = (401, 503)
"""What may become of a request that only asks."""


class Endpoint(NamedTuple):
    """`answer`: the schema of its success, by media type."""

    summary: str
    answer: dict[str, Json]
    errors: tuple[int, ...] = ()
    body: type | None = None
    types: tuple[type, ...] = ()
    """Those that the answer's schemas refer to."""
    unavailable: type = ErrorResponse
    """What a 503 has."""
    error: type = ErrorResponse
    """What the other errors have."""
    query: type | None = None
    """The fields of its query."""
    form: Json | None = None
    """The schema of a body that is a form."""


def ref(kind: type) -> Json:
    """A reference to a type's schema."""
    return {"$ref": REFS.format(name=kind.__name__)}


def json(schema: Json) -> dict[str, Json]:
    """An answer in JSON."""
    return {"application/json": schema}


def asking(summary: str, answer: type, errors: tuple[int, ...] = ASKING, *, query: type | None = None) -> Endpoint:
    """A route that tells something."""
    return Endpoint(summary, json(ref(answer)), errors, types=(answer,), query=query)


def generating(summary: str, body: type, answer: type, *, streams: bool = True) -> Endpoint:
    """A route that computes something."""
    stream = {"text/event-stream": _FRAME} if streams else {}
    return Endpoint(summary, {**json(ref(answer)), **stream}, GENERATING, body, types=(answer,))
