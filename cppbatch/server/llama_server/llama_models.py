"""`POST /models/load` and `POST /models/unload`, as in llama-server's router."""

from __future__ import annotations

import msgspec
from aiohttp import web

from cppbatch.server.api_errors import json_response
from cppbatch.server.endpoint import Routes
from cppbatch.server.keys import KEY
from cppbatch.server.llama_server.llama_status import Success
from cppbatch.server.parse import read_json
from cppbatch.server.served_models import MODELS

routes = Routes()

_ERRORS = (400, 401, 403, 404, 413, 429, 503)


class ModelRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /models/load` and `POST /models/unload`."""

    model: str
    """One of its names."""


@routes.post("/models/load", Success, ModelRequest, _ERRORS)
async def load_model(request: web.Request) -> web.Response:
    """Start loading a model; GET /models shows its state."""
    body = await read_json(request, ModelRequest)
    await request.app[MODELS].load(body.model, request.get(KEY))
    return json_response(Success())


@routes.post("/models/unload", Success, ModelRequest, (*_ERRORS, 409))
async def unload_model(request: web.Request) -> web.Response:
    """Unload a model after its last request; 409 for the only model.

    Answers at once.
    """
    body = await read_json(request, ModelRequest)
    await request.app[MODELS].unload(body.model, request.get(KEY))
    return json_response(Success())
