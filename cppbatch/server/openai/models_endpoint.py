"""`GET /v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from cppbatch.server.anthropic.anthropic_models import (
    AnthropicModel,
    AnthropicModelList,
    AnthropicModelQuery,
    anthropic_model,
    anthropic_model_list,
)
from cppbatch.server.api_errors import ModelNotFound, is_anthropic, json_response
from cppbatch.server.endpoint import Endpoint, json_content, query_endpoint, schema_ref
from cppbatch.server.keys import KEY
from cppbatch.server.serving import SERVING, Serving
from cppbatch.typed_json import convert

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
    """The loaded model, if it is for the key, as a list; for Anthropic's clients in their form."""
    serving = request.app[SERVING]
    is_visible = _is_visible(request)
    if is_anthropic(request):
        query = convert(dict(request.query), AnthropicModelQuery, from_text=True)
        listed = anthropic_model_list(serving, query)
        return json_response(listed if is_visible else AnthropicModelList(data=[], first_id=None, last_id=None))
    return json_response(ModelList(data=[await _model(serving)] if is_visible else []))


@routes.get("/v1/models/{id:.+}")
async def model(request: web.Request) -> web.Response:
    """The loaded model by one of its names. Other names are not found, although requests may name them."""
    serving = request.app[SERVING]
    serving.find_model(request.match_info["id"])
    if not _is_visible(request):
        raise ModelNotFound(f"there is no {request.match_info['id']!r} for this key")
    if is_anthropic(request):
        return json_response(anthropic_model(serving))
    return json_response(await _model(serving))


def _is_visible(request: web.Request) -> bool:
    """Whether the request's key may use the loaded model."""
    rules = request.get(KEY)
    return not rules or rules.may_use(request.app[SERVING].model_names)


def _endpoint(summary: str, response: type, for_anthropic: type, error: int) -> Endpoint:
    """A route whose response for requests with the header `anthropic-version` is Anthropic's."""
    content = json_content({"anyOf": [schema_ref(response), schema_ref(for_anthropic)]})
    endpoint = query_endpoint(summary, response, (error, 401, 503))
    return endpoint._replace(content=content, types=(response, for_anthropic))


ENDPOINTS = {
    ("get", "/v1/models"): _endpoint("The loaded model, as a list", ModelList, AnthropicModelList, 400)._replace(
        query=AnthropicModelQuery
    ),
    ("get", "/v1/models/{id}"): _endpoint("The loaded model by one of its names", Model, AnthropicModel, 404),
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
        workers=[
            ModelWorker(name=each.name, device=each.device, status="draining" if each.draining else each.health.status)
            for each in workers
        ],
    )
    return Model(
        id=serving.name,
        aliases=sorted(serving.settings.aliases),
        tags=list(serving.settings.tags),
        created=serving.started,
        meta=meta,
    )
