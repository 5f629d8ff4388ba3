"""`POST /models/load` and `POST /models/unload`, as in llama-server's router."""

from __future__ import annotations

import msgspec
from aiohttp import web

from cppbatch.server.api_errors import json_response
from cppbatch.server.endpoint import query_endpoint
from cppbatch.server.keys import KEY
from cppbatch.server.llama_server.llama_status import Success
from cppbatch.server.parse import read_json
from cppbatch.server.served_models import MODELS

routes = web.RouteTableDef()


class ModelRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /models/load` and `POST /models/unload`."""

    model: str
    """One of its names."""


@routes.post("/models/load")
async def load_model(request: web.Request) -> web.Response:
    """Has a model loaded, and answers at once; `GET /models` shows the progress."""
    body = await read_json(request, ModelRequest)
    await request.app[MODELS].load(body.model, request.get(KEY))
    return json_response(Success())


@routes.post("/models/unload")
async def unload_model(request: web.Request) -> web.Response:
    """Has a model unloaded once its last request has ended, and answers at once."""
    body = await read_json(request, ModelRequest)
    await request.app[MODELS].unload(body.model, request.get(KEY))
    return json_response(Success())


_ERRORS = (400, 401, 403, 404, 413, 429, 503)

ENDPOINTS = {
    ("post", "/models/load"): query_endpoint(
        "Start loading a model; GET /models shows its state", Success, _ERRORS
    )._replace(body=ModelRequest),
    ("post", "/models/unload"): query_endpoint(
        "Unload a model after its last request; 409 for the only model", Success, (*_ERRORS, 409)
    )._replace(body=ModelRequest),
}
