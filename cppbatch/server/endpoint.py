"""The description of a route for the OpenAPI document."""

from __future__ import annotations

from typing import Any, NamedTuple

from cppbatch.server.api_errors import ErrorResponse

Json = dict[str, Any]

REFS = "#/components/schemas/{name}"
TEXT: Json = {"type": "string"}
_SERVER_SENT_EVENT: Json = {
    "type": "object",
    "description": "With `stream`: a server-sent event with JSON data; OpenAI streams end with [DONE]",
    "properties": {"data": TEXT},
    "required": ["data"],
}
GENERATION_ERRORS = (400, 401, 403, 404, 413, 429, 500, 503)
"""The error statuses of a route that uses the engine."""
QUERY_ERRORS = (401, 503)
"""The error statuses of a route that only reports something."""


class Endpoint(NamedTuple):
    """One route of the OpenAPI document."""

    summary: str
    content: dict[str, Json]
    """The schema of a successful response, by media type."""
    errors: tuple[int, ...] = ()
    """The statuses of error responses."""
    body: type | None = None
    """The type of the JSON request body."""
    takes_list: bool = False
    """The body is a list of this type."""
    types: tuple[type, ...] = ()
    """The types that `content` refers to."""
    unavailable: type = ErrorResponse
    """The body of a 503."""
    error: type = ErrorResponse
    """The body of the other errors."""
    query: type | None = None
    """The fields of the query string."""
    form: Json | None = None
    """The schema of a request body that is a form."""


def schema_ref(kind: type) -> Json:
    """A reference to a type's schema."""
    return {"$ref": REFS.format(name=kind.__name__)}


def json_content(schema: Json) -> dict[str, Json]:
    """Content in JSON."""
    return {"application/json": schema}


def query_endpoint(
    summary: str, response: type, errors: tuple[int, ...] = QUERY_ERRORS, *, query: type | None = None
) -> Endpoint:
    """A route that reports something."""
    return Endpoint(summary, json_content(schema_ref(response)), errors, types=(response,), query=query)


def generation_endpoint(summary: str, body: type, response: type, *, streams: bool = True) -> Endpoint:
    """A route that uses the engine."""
    stream = {"text/event-stream": _SERVER_SENT_EVENT} if streams else {}
    content = {**json_content(schema_ref(response)), **stream}
    return Endpoint(summary, content, GENERATION_ERRORS, body, types=(response,))
