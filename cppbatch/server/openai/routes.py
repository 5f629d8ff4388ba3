"""OpenAI's routes. Each reads its request, plans it, and sends the answer."""

from __future__ import annotations

from aiohttp import web

from cppbatch.server.api_errors import json_response
from cppbatch.server.openai.plans import prepare_chat_completion, prepare_completion
from cppbatch.server.openai.schemas import ChatRequest, CompletionRequest
from cppbatch.server.parse import read_json
from cppbatch.server.response import respond
from cppbatch.server.serving import SERVING, Serving
from cppbatch.server.shapes import Model, ModelList, ModelMeta, ModelWorker

routes = web.RouteTableDef()


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The loaded model, by each of its names."""
    serving = request.app[SERVING]
    return json_response(ModelList(data=[await _model(serving, name) for name in serving.names]))


@routes.get("/v1/models/{id:.+}")
async def model(request: web.Request) -> web.Response:
    """The loaded model by its id."""
    name, serving = request.match_info["id"], request.app[SERVING]
    if name not in serving.names:
        raise web.HTTPNotFound(
            text=f"there is no model {name!r}; this server has {', '.join(map(repr, serving.names))}"
        )
    return json_response(await _model(serving, name))


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Continues one or more prompts."""
    body = await read_json(request, CompletionRequest)
    return await respond(request, await prepare_completion(body, request.app[SERVING]))


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Continues a conversation with the assistant's next message."""
    body = await read_json(request, ChatRequest)
    return await respond(request, await prepare_chat_completion(body, request.app[SERVING]))


async def _model(serving: Serving, name: str) -> Model:
    info, workers = serving.info, await serving.client.workers()
    meta = ModelMeta(
        description=info.description,
        n_ctx=info.n_ctx,
        kv_layout=info.kv_layout,
        sampling=info.sampling,
        n_ctx_train=info.n_ctx_train,
        max_sequence=info.max_sequence,
        n_params=info.n_params,
        n_vocab=info.n_vocab,
        size=info.size_bytes,
        workers=[ModelWorker(name=each.name, device=each.device, status=each.health.status) for each in workers],
    )
    return Model(id=name, created=serving.started, meta=meta)
