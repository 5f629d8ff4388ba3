"""`GET /v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from cppbatch.server.api_errors import json_response
from cppbatch.server.endpoint import query_endpoint
from cppbatch.server.serving import SERVING, Serving

routes = web.RouteTableDef()


class ModelWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engines that run the model."""

    name: str
    device: int | None
    """The GPU it runs on, if it was given one."""
    status: str


class ModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the model that OpenAI's object does not have."""

    description: str
    n_ctx: int
    """KV cells of each worker."""
    kv_layout: str
    sampling: str
    n_ctx_train: int
    max_sequence: int
    """The maximum number of tokens of prompt and completion together."""
    n_params: int
    n_vocab: int
    size: int
    """Bytes."""
    workers: list[ModelWorker]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as in OpenAI's API."""

    id: str
    """The name of the model in responses."""
    aliases: list[str]
    """--alias."""
    tags: list[str]
    """--tags."""
    object: Literal["model"] = "model"
    created: int
    """When the server started, in seconds since 1970."""
    owned_by: Literal["cppbatch"] = "cppbatch"
    meta: ModelMeta


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The loaded model, as a list."""
    return json_response(ModelList(data=[await _model(request.app[SERVING])]))


@routes.get("/v1/models/{id:.+}")
async def model(request: web.Request) -> web.Response:
    """The loaded model by one of its names. Other names are not found, although requests may name them."""
    serving = request.app[SERVING]
    serving.find_model(request.match_info["id"])
    return json_response(await _model(serving))


ENDPOINTS = {
    ("get", "/v1/models"): query_endpoint("The loaded model, as a list", ModelList),
    ("get", "/v1/models/{id}"): query_endpoint("The loaded model by one of its names", Model, (401, 404, 503)),
}


async def _model(serving: Serving) -> Model:
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
    return Model(
        id=serving.name,
        aliases=sorted(serving.settings.aliases),
        tags=list(serving.settings.tags),
        created=serving.started,
        meta=meta,
    )
