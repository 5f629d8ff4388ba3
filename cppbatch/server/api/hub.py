"""`/models/hub`: what can be pulled from the Hugging Face hub. `POST /api/pull` does it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.errors import ConfigError, InvalidRequest, ModelError
from cppbatch.models.hub import HubModel, hub_model
from cppbatch.models.hub_search import fetch_headers, repository_files, search_hub
from cppbatch.server.api.ollama.manage import check_may_change
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.sizes import models_fit
from cppbatch.typed_json import convert

routes = Routes()

_ERRORS = (400, 401, 403, 409, 503)
Result = TypeVar("Result")


class HubQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query string of `GET /models/hub`."""

    search: str
    """Words of the repository's name."""


class HubRepository(msgspec.Struct, frozen=True, kw_only=True):
    """A repository with GGUF files."""

    id: str
    """OWNER/REPO."""
    downloads: int
    """In the last month."""
    likes: int


class HubList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /models/hub`."""

    data: list[HubRepository]
    """The most downloaded first; up to 30."""


class FilesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query string of `GET /models/hub/{repository}`."""

    fit: str = ""
    """Report only whether this file would fit into memory, which reads the start of it (up to some MB)."""


class HubModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a repository."""

    model: str
    """The name for `POST /api/pull`: OWNER/REPO:FILE."""
    file: str
    """The first one, if it is split."""
    weights: str
    """The type of its weights, by its name; "": unknown."""
    size: int
    """Bytes of all its files."""
    default: bool
    """Whether OWNER/REPO means this one."""
    here: bool
    """Whether it is in the models folder."""


class HubFiles(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /models/hub/{repository}`."""

    data: list[HubModelFile]
    """The smallest first. Empty with `fit`."""
    fit: str | UnsetType = UNSET
    """With `fit`: as in `GET /v1/models`."""
    free_disk: int
    """Bytes, where the models folder is."""
    free_memory: int
    """Free host memory in bytes."""


@routes.get("/models/hub", HubList, _ERRORS, query=HubQuery)
async def search(request: web.Request) -> web.Response:
    """Search the Hugging Face hub for repositories with GGUF files."""
    check_may_change(request)
    query = convert(dict(request.query), HubQuery, from_text=True)
    found = await _ask("search", lambda: search_hub(query.search))
    data = [HubRepository(id=each.repository, downloads=each.downloads, likes=each.likes) for each in found]
    return json_response(HubList(data=data))


@routes.get("/models/hub/{repository:.+}", HubFiles, _ERRORS, query=FilesQuery)
async def files(request: web.Request) -> web.Response:
    """List the models of a repository on the Hugging Face hub, or report whether one of them would fit into memory."""
    folder = check_may_change(request).folder_of_models()
    query = convert(dict(request.query), FilesQuery, from_text=True)
    name = request.match_info["repository"]
    model = hub_model(f"{name}:{query.fit}" if query.fit else name)
    if model is None or (model.choice and not query.fit):
        raise InvalidRequest("repository", f"is {name!r:.200}; it must be OWNER/REPO, and fit one of its files")
    data: list[HubModelFile] = []
    fit: str | UnsetType = UNSET
    if query.fit:
        fit = await _ask("fit", lambda: _fit(model))
    else:
        data = [
            HubModelFile(
                model=f"{model.repository}:{each.file}",
                file=each.file,
                weights=each.weights,
                size=each.n_bytes,
                default=each.is_default,
                here=each.is_here,
            )
            for each in await _ask("repository", lambda: repository_files(model.repository, folder))
        ]
    free = await asyncio.to_thread(shutil.disk_usage, folder)
    return json_response(HubFiles(data=data, fit=fit, free_disk=free.free, free_memory=free_host_memory()))


def _fit(model: HubModel) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return models_fit([fetch_headers(model, Path(folder))])[0]


async def _ask(field: str, ask: Callable[[], Result]) -> Result:
    """What the hub answers. Raises `InvalidRequest`."""
    try:
        return await asyncio.to_thread(ask)
    except (ModelError, ConfigError) as error:
        raise InvalidRequest(field, str(error)) from error
