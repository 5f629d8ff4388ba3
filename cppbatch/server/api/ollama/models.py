"""`/api/tags`, `/api/ps`, `/api/show` and `/api/version`: what Ollama's clients ask about models."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from cppbatch.errors import InvalidRequest, ModelError
from cppbatch.server.api.ollama.builder import ERRORS
from cppbatch.server.api.ollama.descriptions import (
    ListedModel,
    RunningModel,
    ShowResponse,
    list_model,
    running_model,
    show_model,
)
from cppbatch.server.api.ollama.fields import name_of
from cppbatch.server.auth.keys import KEY
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import QUERY_ERRORS, Routes
from cppbatch.server.models.served import MODELS, ModelEntry, ServedModels

routes = Routes()
API_VERSION = "0.24.0"
"""The version of Ollama whose API this is. Clients compare it with the first version that has what they need."""


class VersionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /api/version`."""

    version: str
    """The version of Ollama's API."""


class TagsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /api/tags`."""

    models: list[ListedModel]


class PsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /api/ps`."""

    models: list[RunningModel]


class ShowRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/show`."""

    model: str = ""
    name: str = ""
    """An older name for `model`."""
    verbose: bool | None = None
    """Add `tensors`."""


@routes.get("/api/version", VersionResponse, **ERRORS)
async def version(_request: web.Request) -> web.Response:
    """Get the version of Ollama whose API this server has."""
    return json_response(VersionResponse(version=API_VERSION))


@routes.get("/api/tags", TagsResponse, **ERRORS)
async def tags(request: web.Request) -> web.Response:
    """List all models that the key allows, loaded or not, in Ollama's API."""
    entries = await request.app[MODELS].entries(request.get(KEY))
    return json_response(
        TagsResponse(models=await asyncio.to_thread(lambda: [*filter(None, map(list_model, entries))]))
    )


@routes.get("/api/ps", PsResponse, **ERRORS)
async def running(request: web.Request) -> web.Response:
    """List the loaded models, in Ollama's API."""
    entries = await request.app[MODELS].entries(request.get(KEY))
    loaded = [entry for entry in entries if entry.status in ("loaded", "unloading") and entry.info]
    return json_response(
        PsResponse(models=await asyncio.to_thread(lambda: [*filter(None, map(running_model, loaded))]))
    )


@routes.post("/api/show", ShowResponse, ShowRequest, (*QUERY_ERRORS, 400, 403, 404, 413, 429), **ERRORS)
async def show(request: web.Request) -> web.Response:
    """Describe a model: its metadata, template, settings and capabilities, in Ollama's API."""
    body = await read_json(request, ShowRequest)
    if not (name := body.model or body.name):
        raise InvalidRequest("model", "is required")
    entry = await entry_of(request, name)
    try:
        return json_response(await asyncio.to_thread(show_model, entry, verbose=bool(body.verbose)))
    except ModelError as error:
        raise InvalidRequest("model", str(error)) from error


async def entry_of(request: web.Request, name: str) -> ModelEntry:
    """The model with this name; that of a server with one model, which answers to any name. Raises `ModelNotFound`."""
    models: ServedModels = request.app[MODELS]
    known = name_of(models, name)
    answers_to_any = models.router is None and not models.settings.strict_model and not models.knows(known)
    if not answers_to_any:
        return await models.entry(known, request.get(KEY))
    if rules := request.get(KEY):
        models.check_key(rules)
    (entry,) = await models.entries(None)
    return entry
