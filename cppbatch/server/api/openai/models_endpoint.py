"""`GET /v1/models`, in the formats of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.engine.model_info import ModelInfo
from cppbatch.errors import ConfigError, InvalidRequest, ModelError
from cppbatch.server.api.openai.anthropic_models import (
    AnthropicModel,
    AnthropicModelList,
    AnthropicModelQuery,
    anthropic_model,
    anthropic_model_list,
)
from cppbatch.server.auth.keys import KEY
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.error_formats import is_anthropic
from cppbatch.server.models.served import MODELS, Deletable, ModelEntry, ModelStatusName, ServedModels
from cppbatch.sizing.machine import free_host_memory
from cppbatch.typed_json import convert

routes = Routes()


class ModelWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engines that run the model."""

    name: str
    device: int | None
    """The GPU assigned to it, if any."""
    status: str


class ModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Model metadata beyond OpenAI's model object."""

    description: str
    n_ctx: int | UnsetType = UNSET
    """Maximum tokens of prompt and completion together, as in llama-server. This and the other optional fields are only
    set while the model is loaded."""
    n_cells: int | UnsetType = UNSET
    """KV cells per worker."""
    kv_layout: str | UnsetType = UNSET
    sampling: str | UnsetType = UNSET
    n_ctx_train: int | None
    max_sequence: int | UnsetType = UNSET
    """The same as `n_ctx`."""
    n_parallel: int | UnsetType = UNSET
    """Maximum concurrent sequences."""
    n_params: int
    n_vocab: int | None
    size: int
    """Bytes."""
    pooling: str | None = None
    """How texts become vectors; `rank`: a reranker; None: the model generates text."""
    workers: list[ModelWorker]


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Input and output modalities, as reported by llama-server's router."""

    input_modalities: list[str]
    """`text`, `image`, `audio`."""
    output_modalities: tuple[Literal["text"]] = ("text",)


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Load state of a model, as reported by llama-server's router."""

    value: ModelStatusName
    progress: float | UnsetType = UNSET
    """0.0 to 1.0, while loading."""
    failed: bool | UnsetType = UNSET
    """True: it could not be loaded, or its workers crash repeatedly."""
    error: str | UnsetType = UNSET
    """Why."""


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query string of `GET /v1/models` and `GET /models`."""

    reload: bool = False
    """Rescan the folder and the settings file first (--models-dir, --models-config)."""
    fit: bool = False
    """Report whether unloaded models would fit into memory, which takes about a second."""


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
    status: ModelStatus | UnsetType = UNSET
    """Absent on a server with one model, as in llama-server: clients take it for a sign of several."""
    default: bool
    """Whether requests without a model use it."""
    pinned: bool
    """Whether it is never unloaded in favour of another one."""
    deletable: Deletable | UnsetType = UNSET
    """What `DELETE /api/delete` removes: the `file` of a pulled model, the `name` of a created one. Absent: refused."""
    needs: int | UnsetType = UNSET
    """Estimated memory in bytes. Absent while it is not loaded, and for a single model."""
    fit: str | UnsetType = UNSET
    """With `fit`, for an unloaded model: `yes`; with smaller -np -c; `no`, with the memory required; or `?`."""
    meta: ModelMeta | UnsetType = UNSET
    """Absent if the file cannot be read."""
    architecture: Architecture | UnsetType = UNSET
    """Set while the model is loaded, like the next field."""
    capabilities: list[Literal["completion", "multimodal"]] | UnsetType = UNSET
    """`multimodal`: prompts may contain images or audio. The names are llama-server's."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
    free_memory: int | UnsetType = UNSET
    """Free host memory in bytes, with `fit`."""


@routes.get(
    "/v1/models",
    (ModelList, AnthropicModelList),
    (400, 401, 503),
    query=AnthropicModelQuery,
    also=("/models",),
)
async def models(request: web.Request) -> web.Response:
    """List all models, loaded or not.

    Only models that the key allows; in Anthropic's format for requests with the header `anthropic-version`.
    """
    served = request.app[MODELS]
    if is_anthropic(request):
        page = convert(dict(request.query), AnthropicModelQuery, from_text=True)
        return json_response(anthropic_model_list(await served.entries(request.get(KEY)), served.started, page))
    query = convert(dict(request.query), ModelQuery, from_text=True)
    if query.reload:
        try:
            await served.reload()
        except (ConfigError, ModelError) as error:
            raise InvalidRequest("reload", f"the models are unchanged: {error}") from error
    entries = await served.entries(request.get(KEY))
    if not query.fit:
        return json_response(ModelList(data=[_model(served, entry) for entry in entries]))
    fits = await served.fits(entries)
    data = [_model(served, entry, fit) for entry, fit in zip(entries, fits, strict=True)]
    return json_response(ModelList(data=data, free_memory=free_host_memory()))


@routes.get("/v1/models/{id:.+}", (Model, AnthropicModel), (401, 404, 503))
async def model(request: web.Request) -> web.Response:
    """Get a model by any of its names.

    With a single model, other names give 404, although requests may use them.
    """
    served = request.app[MODELS]
    entry = await served.entry(request.match_info["id"], request.get(KEY))
    if is_anthropic(request):
        return json_response(anthropic_model(entry, served.started))
    return json_response(_model(served, entry))


def _model(served: ServedModels, entry: ModelEntry, fit: str | None = None) -> Model:
    return Model(
        id=entry.name,
        aliases=sorted(entry.settings.aliases),
        tags=list(entry.settings.tags),
        created=served.started,
        path=str(entry.path),
        status=model_status(entry) if served.router else UNSET,
        default=entry.default,
        pinned=entry.pinned,
        deletable=served.deletable(entry) or UNSET,
        needs=UNSET if entry.needs is None else entry.needs,
        fit=fit or UNSET,
        meta=_meta(entry),
        architecture=Architecture(input_modalities=["text", *entry.info.modalities]) if entry.info else UNSET,
        capabilities=_capabilities(entry.info) if entry.info else UNSET,
    )


def model_status(entry: ModelEntry) -> ModelStatus:
    """The model's load state."""
    return ModelStatus(
        value=entry.status,
        progress=UNSET if entry.progress is None else entry.progress,
        failed=True if entry.is_failed else UNSET,
        error=entry.error or UNSET,
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
            n_ctx=info.max_sequence,
            n_cells=info.n_ctx,
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
            description=f"{facts.architecture} {facts.file_type}",
            n_ctx_train=facts.n_ctx_train,
            n_params=facts.n_params,
            n_vocab=facts.n_vocab,
            size=facts.size_bytes,
            pooling=facts.pooling,
            workers=workers,
        )
    return UNSET
