"""`/models/load`, `/models/unload` and `/models/sse`, as in llama-server's router."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.server.api.llama_server.status import Success
from cppbatch.server.api.openai.models_endpoint import ModelStatus, model_status
from cppbatch.server.auth.keys import KEY
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.connections import connection_of
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.event_stream import STREAM_HEADERS
from cppbatch.server.models.served import MODELS
from cppbatch.server.request_checks import IN_FLIGHT

routes = Routes()


_ERRORS = (400, 401, 403, 404, 413, 429, 503)


class ModelRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /models/load` and `POST /models/unload`."""

    model: str
    """Any of the model's names."""


@routes.post("/models/load", Success, ModelRequest, _ERRORS)
async def load_model(request: web.Request) -> web.Response:
    """Start loading a model; GET /models shows its state."""
    body = await read_json(request, ModelRequest)
    await request.app[MODELS].load(body.model, request.get(KEY))
    return json_response(Success())


@routes.post("/models/unload", Success, ModelRequest, (*_ERRORS, 409))
async def unload_model(request: web.Request) -> web.Response:
    """Unload a model after its last request, or stop loading it; 409 for the only model.

    Responds immediately. Requests that wait for a load that stops get a 503.
    """
    body = await read_json(request, ModelRequest)
    await request.app[MODELS].unload(body.model, request.get(KEY))
    return json_response(Success())


class ModelEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a model has changed."""

    model: str
    event: Literal["model_status", "model_remove"]
    data: ModelStatus | UnsetType = UNSET


@routes.get(
    "/models/sse",
    {"text/event-stream": {"type": "object", "description": "A server-sent event. Its data is a ModelEvent in JSON"}},
    (401, 503),
    types=(ModelEvent,),
    options={"allow_head": False},
)
async def model_events(request: web.Request) -> web.StreamResponse:
    """Changes of the models' states, until the server or the client ends the connection."""
    models, rules = request.app[MODELS], request.get(KEY)
    if connection := connection_of(request):
        connection.give_way()
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    known, silent_since = {entry.name: model_status(entry) for entry in await models.entries(rules)}, monotonic()
    while not request.app[IN_FLIGHT].draining:
        await asyncio.sleep(1.0)
        now = {entry.name: model_status(entry) for entry in await models.entries(rules)}
        events = [ModelEvent(model=name, event="model_remove") for name in known if name not in now]
        events += [
            ModelEvent(model=name, event="model_status", data=status)
            for name, status in now.items()
            if known.get(name) != status
        ]
        lines = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
        if not lines and monotonic() - silent_since > 15.0:
            lines = [b": nothing has changed\n\n"]
        if lines:
            await response.write(b"".join(lines))
            silent_since = monotonic()
        known = now
    return response
