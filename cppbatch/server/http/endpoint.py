"""Endpoints: each is declared once with its handler, for the application, the OpenAPI document and batches."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, get_args

from aiohttp import web

from cppbatch.server.http.error_formats import ErrorResponse

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Declare = Callable[[Handler], Handler]
Answer = Any
"""A type, a list of a type (`list[Slot]`), a tuple of alternative types, or schemas by media type."""

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
"""The error statuses of a route that only reports state."""


class Endpoint(NamedTuple):
    """The description of a route for the OpenAPI document, and its use in batches."""

    summary: str
    content: dict[str, Json]
    """The schema of a successful response, by media type."""
    types: tuple[type, ...]
    """The types referenced by `content`."""
    errors: tuple[int, ...]
    """The statuses of error responses."""
    body: type | None = None
    """The type of the JSON request body."""
    takes_list: bool = False
    """The body is a list of this type."""
    unavailable: type = ErrorResponse
    """The body of a 503 response."""
    error: type = ErrorResponse
    """The body of other errors."""
    query: type | None = None
    """The fields of the query string."""
    form: Json | None = None
    """The schema of a request body that is a form."""
    prepare: Callable[..., Awaitable[Any]] | None = None
    """Makes the `ResponseBuilder` of a batch line, from its body and its `Serving`; None: batches do not support it."""


class Route(NamedTuple):
    """A handler, with its method in lower case and its path in aiohttp's notation."""

    method: str
    path: str
    handler: Handler
    endpoint: Endpoint
    options: dict[str, Any]
    """For aiohttp."""

    @property
    def shown_path(self) -> str:
        """The path in the OpenAPI document."""
        return re.sub(r"{(\w+):[^}]*}", r"{\1}", self.path)


class Routes(list[Route]):
    """The routes of a module: `@routes.post("/tokenize", TokenizeResponse, TokenizeRequest)`.

    The first paragraph of a handler's docstring is its summary in the OpenAPI document. `more`: as for `_add`.
    """

    def get(self, path: str, answer: Answer, errors: tuple[int, ...] = QUERY_ERRORS, **more: Any) -> Declare:
        """Declares the handler of a GET route, by default one that only reports state."""
        return partial(self._add, "get", path, answer, errors=errors, **more)

    def post(
        self,
        path: str,
        answer: Answer,
        body: type | None = None,
        errors: tuple[int, ...] = GENERATION_ERRORS,
        **more: Any,
    ) -> Declare:
        """Declares the handler of a POST route, by default one that uses the engine."""
        return partial(self._add, "post", path, answer, body=body, errors=errors, **more)

    def delete(self, path: str, answer: Answer, errors: tuple[int, ...], **more: Any) -> Declare:
        """Declares the handler of a DELETE route."""
        return partial(self._add, "delete", path, answer, errors=errors, **more)

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application."""
        app.add_routes(web.route(route.method.upper(), route.path, route.handler, **route.options) for route in self)

    def _add(
        self,
        method: str,
        path: str,
        answer: Answer,
        handler: Handler,
        *,
        streams: bool = False,
        lines: bool = False,
        also: tuple[str, ...] = (),
        options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Handler:
        """`streams`: the response may be streamed; `lines`: as lines of JSON. `also`: its paths in other APIs.
        `options`: for aiohttp. `fields`: of `Endpoint`, such as the `types` referenced by schemas."""
        (paragraph, *_) = (handler.__doc__ or "").split("\n\n")
        summary = " ".join(paragraph.split()).removesuffix(".")
        content, types = _content(answer)
        if streams:
            content = {**content, "text/event-stream": _SERVER_SENT_EVENT}
        if lines:
            content = {**content, "application/x-ndjson": content["application/json"]}
        described: Json = {"summary": summary, "content": content, "types": types, **fields}
        route = Route(method, path, handler, Endpoint(**described), options or {})
        same = route.endpoint._replace(summary=f"Same as {path}", prepare=None)
        self.extend([route, *(route._replace(path=other, endpoint=same) for other in also)])
        return handler


def schema_ref(kind: type) -> Json:
    """A reference to a type's schema."""
    return {"$ref": REFS.format(name=kind.__name__)}


def json_content(schema: Json) -> dict[str, Json]:
    """Content in JSON."""
    return {"application/json": schema}


def _content(answer: Answer) -> tuple[dict[str, Json], tuple[type, ...]]:
    """The content of a response, and the types it references."""
    if isinstance(answer, dict):
        return answer, ()
    if isinstance(answer, tuple):
        return json_content({"anyOf": [schema_ref(kind) for kind in answer]}), answer
    if args := get_args(answer):
        (kind,) = args
        return json_content({"type": "array", "items": schema_ref(kind)}), (kind,)
    return json_content(schema_ref(answer)), (answer,)
