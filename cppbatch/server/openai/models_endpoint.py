"""`GET /v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.bench.memory.memory_demand import free_host_memory
from cppbatch.engine.model_info import ModelInfo
from cppbatch.server.anthropic.anthropic_models import (
    AnthropicModel,
    AnthropicModelList,
    AnthropicModelQuery,
    anthropic_model,
    anthropic_model_list,
)
from cppbatch.server.api_errors import is_anthropic, json_response
from cppbatch.server.endpoint import Routes
from cppbatch.server.keys import KEY
from cppbatch.server.served_models import MODELS, ModelEntry, ModelStatusName
from cppbatch.typed_json import convert

routes = Routes()


class ModelWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engines that run the model."""

    name: str
    device: int | None
    """The GPU it runs on, if it was given one."""
    status: str


class ModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Model metadata beyond OpenAI's model object."""

    description: str
    n_ctx: int | UnsetType = UNSET
    """KV cells of each worker. This and the fields without a value are known while the model is loaded."""
    kv_layout: str | UnsetType = UNSET
    sampling: str | UnsetType = UNSET
    n_ctx_train: int | None
    max_sequence: int | UnsetType = UNSET
    """The maximum number of tokens of prompt and completion together."""
    n_parallel: int | UnsetType = UNSET
    """Sequences that run at the same time."""
    n_params: int
    n_vocab: int | None
    size: int
    """Bytes."""
    pooling: str | None = None
    """How texts become vectors; rank: a reranker; None: a model that generates text."""
    workers: list[ModelWorker]


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Input and output modalities, as reported by llama-server's router."""

    input_modalities: list[str]
    """text, image, audio."""
    output_modalities: tuple[Literal["text"]] = ("text",)


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Load state of a model, as reported by llama-server's router."""

    value: ModelStatusName
    progress: float | UnsetType = UNSET
    """While it is loading: 0.0 to 1.0."""
    failed: bool | UnsetType = UNSET
    """True: it could not be loaded, or its workers die again and again."""
    error: str | UnsetType = UNSET
    """Why."""


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query string of `GET /v1/models` and `GET /models`."""

    reload: bool = False
    """Look at the folder and the settings file first (--models-dir, --models-config)."""
    fit: bool = False
    """Say whether the models that are not loaded would fit into memory, which takes a second."""


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
    path: str
    status: ModelStatus
    default: bool
    """Requests without a model are for it."""
    pinned: bool
    """It never leaves memory for another one."""
    needs: int | UnsetType = UNSET
    """Bytes of memory that it was planned to need. Absent while it is not loaded, and for a single model."""
    fit: str | UnsetType = UNSET
    """Of a model that is not loaded, with `fit`: yes; with smaller -np -c; no, with what it needs; or ?"""
    meta: ModelMeta | UnsetType = UNSET
    """Absent if the file cannot be read."""
    architecture: Architecture | UnsetType = UNSET
    """Known while the model is loaded, as the field after it."""
    capabilities: list[Literal["completion", "multimodal"]] | UnsetType = UNSET
    """multimodal: pictures or sound may be in prompts; the names are llama-server's."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
    free_memory: int | UnsetType = UNSET
    """Free bytes of the host, with `fit`."""


@routes.get("/v1/models", (ModelList, AnthropicModelList), (400, 401, 503), query=AnthropicModelQuery)
async def models(request: web.Request) -> web.Response:
    """List all models, loaded or not.

    Those that are for the key; in Anthropic's form for requests with the header `anthropic-version`.
    """
    served = request.app[MODELS]
    if is_anthropic(request):
        page = convert(dict(request.query), AnthropicModelQuery, from_text=True)
        return json_response(anthropic_model_list(await served.entries(request.get(KEY)), served.started, page))
    query = convert(dict(request.query), ModelQuery, from_text=True)
    if query.reload:
        await served.reload()
    entries = await served.entries(request.get(KEY))
    if not query.fit:
        return json_response(ModelList(data=[_model(entry, served.started) for entry in entries]))
    fits = await served.fits(entries)
    data = [_model(entry, served.started, fit) for entry, fit in zip(entries, fits, strict=True)]
    return json_response(ModelList(data=data, free_memory=free_host_memory()))


@routes.get("/v1/models/{id:.+}", (Model, AnthropicModel), (401, 404, 503))
async def model(request: web.Request) -> web.Response:
    """Get a model by any of its names.

    Of a single model, others are not found, although requests may name them.
    """
    served = request.app[MODELS]
    entry = await served.entry(request.match_info["id"], request.get(KEY))
    if is_anthropic(request):
        return json_response(anthropic_model(entry, served.started))
    return json_response(_model(entry, served.started))


def _model(entry: ModelEntry, started: int, fit: str | None = None) -> Model:
    return Model(
        id=entry.name,
        aliases=sorted(entry.settings.aliases),
        tags=list(entry.settings.tags),
        created=started,
        path=str(entry.path),
        status=ModelStatus(
            value=entry.status,
            progress=UNSET if entry.progress is None else entry.progress,
            failed=True if entry.is_failed else UNSET,
            error=entry.error or UNSET,
        ),
        default=entry.default,
        pinned=entry.pinned,
        needs=UNSET if entry.needs is None else entry.needs,
        fit=fit or UNSET,
        meta=_meta(entry),
        architecture=Architecture(input_modalities=["text", *entry.info.modalities]) if entry.info else UNSET,
        capabilities=_capabilities(entry.info) if entry.info else UNSET,
    )


def _capabilities(info: ModelInfo) -> list[Literal["completion", "multimodal"]]:
    return ["completion", "multimodal"] if info.modalities else ["completion"]


def _meta(entry: ModelEntry) -> ModelMeta | UnsetType:
    workers = [
        ModelWorker(name=each.name, device=each.device, status="draining" if each.draining else each.health.status)
        for each in entry.workers
    ]
    if info := entry.info:
        return ModelMeta(
            description=info.description,
            n_ctx=info.n_ctx,
            kv_layout=info.kv_layout,
            sampling=info.sampling,
            n_ctx_train=info.n_ctx_train,
            max_sequence=info.max_sequence,
            n_parallel=entry.n_parallel,
            n_params=info.n_params,
            n_vocab=info.n_vocab,
            size=info.size_bytes,
            pooling=info.pooling,
            workers=workers,
        )
    if facts := entry.facts:
        return ModelMeta(
            description=f"{facts.architecture} {facts.main_type}",
            n_ctx_train=facts.n_ctx_train,
            n_params=facts.n_params,
            n_vocab=facts.n_vocab,
            size=facts.size_bytes,
            pooling=facts.pooling,
            workers=workers,
        )
    return UNSET
