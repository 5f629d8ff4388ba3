"""`/api/pull`, `/api/create`, `/api/copy`, `/api/delete`, and what is refused: `/api/push`, `/api/blobs`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch import child_processes
from cppbatch.engine.params import KINDS, UNLIMITED
from cppbatch.errors import Conflict, CppBatchError, Forbidden, InvalidRequest
from cppbatch.models.find import remove_model
from cppbatch.models.hub import HubModel, bytes_so_far, hub_model, pull_whole
from cppbatch.models.library import library_model
from cppbatch.server.api.ollama.builder import ERRORS
from cppbatch.server.api.ollama.fields import name_of, plain_name
from cppbatch.server.api.ollama.models import entry_of
from cppbatch.server.api.ollama.types import Json
from cppbatch.server.auth.keys import KEY
from cppbatch.server.fields.parse import read_json
from cppbatch.server.fields.sampling import SamplingFields
from cppbatch.server.http.api_errors import ModelNotFound, api_error, json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.error_formats import ollama_error
from cppbatch.server.http.event_stream import LINES, STREAM_HEADERS, ServerSentEvent
from cppbatch.server.models.created import CreatedModel
from cppbatch.server.models.served import MODELS, ServedModels
from cppbatch.typed_json import convert

log = logging.getLogger("cppbatch.models")

routes = Routes()

_STATUSES = (400, 401, 403, 404, 409, 413, 429, 503, 507)


class ProgressResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What is being done: a line of a stream, and the last one alone without a stream."""

    status: str
    """`success` at the end."""
    digest: str | UnsetType = UNSET
    """The file that is downloaded."""
    total: int | UnsetType = UNSET
    """Bytes of the download, with `completed`."""
    completed: int | UnsetType = UNSET


class NameFields(msgspec.Struct, kw_only=True):
    """Fields of requests about a model by name."""

    model: str = ""
    name: str = ""
    """An older name for `model`."""

    @property
    def named(self) -> str:
        """The name. Raises `InvalidRequest` if it is missing."""
        if given := self.model or self.name:
            return given
        raise InvalidRequest("model", "is required")


class PullRequest(NameFields, kw_only=True):
    """The body of `POST /api/pull`."""

    stream: bool | None = None
    """Default: true."""
    insecure: bool | None = None
    """Not used."""


class CreateRequest(NameFields, kw_only=True):
    """The body of `POST /api/create`."""

    source: str | None = msgspec.field(default=None, name="from")
    """The model it is made from."""
    system: str | None = None
    """The system message of conversations without one."""
    parameters: Json | None = None
    """Sampling defaults, as `options` of `/api/chat`."""
    stream: bool | None = None
    """Default: true."""
    license: Any = None
    """Not used."""
    template: str | None = None
    """Not supported, like the following fields."""
    messages: list[Json] | None = None
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    quantize: str | None = None


class CopyRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/copy`."""

    source: str
    destination: str


# --- who may change models ------------------------------------------------------------------------------------------

_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")


def check_may_change(request: web.Request) -> ServedModels:
    """The models. Raises `Forbidden` for a key that is limited to some models, and for a request of another machine on
    a server without keys; `Conflict` for a server without a folder of models."""
    if rules := request.get(KEY):
        if rules.models is not None:
            raise Forbidden("model", "this API key is limited to some models, so it cannot add or remove any")
    elif not _is_from_here(request):
        message = "models can only be changed from the server's machine, or with an API key; start it with --api-key"
        raise Forbidden("model", message)
    models = request.app[MODELS]
    models.folder_of_models()
    return models


def _is_from_here(request: web.Request) -> bool:
    """Whether a program of this machine has sent it, and not a proxy for others."""
    with contextlib.suppress(ValueError):  # no address: a Unix socket
        is_local = ipaddress.ip_address(request.remote or "").is_loopback
        return is_local and not any(name in request.headers for name in _FORWARDED)
    return False


_NAME = re.compile(r"[\w][\w.:-]*(?:/[\w][\w.:-]*)*")
_LONGEST = 200


def _check_name(field: str, given: str) -> str:
    """The name for a new model. Raises `InvalidRequest`."""
    name = plain_name(given)
    if len(name) > _LONGEST or not _NAME.fullmatch(name):
        message = f"it must be up to {_LONGEST} letters, digits and . _ - : /, not starting with one of these"
        raise InvalidRequest(field, f"is {given!r:.100}; {message}")
    return name


# --- create, copy, delete -------------------------------------------------------------------------------------------


@routes.post("/api/create", ProgressResponse, CreateRequest, _STATUSES, lines=True, **ERRORS)
async def create(request: web.Request) -> web.StreamResponse:
    """Create a model from another one, with a system message and sampling defaults, in Ollama's API.

    It is stored in the models folder, and every API serves it.
    """
    body = await read_json(request, CreateRequest)
    models = check_may_change(request)
    name = _check_name("model", body.named)
    for field, remedy in _NOT_CREATED.items():
        if getattr(body, field):
            raise InvalidRequest(field, f"is not supported; {remedy}")
    if not body.source:
        raise InvalidRequest("from", "is required: the name of a model of this server")
    made = await _made_from(request, body.source)
    own = CreatedModel(
        base=made.base,
        system=made.system if body.system is None else body.system,
        sampling=made.sampling | _sampling_defaults(body.parameters or {}),
    )
    await models.create(name, own)
    log.info("created the model %s from %s", name, made.base)
    return await _respond_with_progress(request, _steps("using the model " + made.base), stream=body.stream)


_NOT_CREATED = {
    "template": "chat templates are Jinja here: set chat-template in --models-config",
    "messages": "send them with each request; the prefix cache makes them cheap",
    "files": "put the GGUF file into the models folder",
    "adapters": "set lora in --models-config",
    "quantize": "use `cppbatch models requantize`",
}


async def _made_from(request: web.Request, source: str) -> CreatedModel:
    """A model with nothing of its own, made from this one. Raises `ModelNotFound`, `Forbidden`."""
    models = request.app[MODELS]
    known = name_of(models, source.removesuffix(".gguf"))
    entry = await models.entry(known, request.get(KEY))
    return models.find_created(entry.name) or CreatedModel(base=entry.name)


def _sampling_defaults(parameters: Json) -> Json:
    """Ollama's parameters as fields of `SamplingParams`. Others have no effect. Raises `InvalidRequest`."""
    ours = {theirs: name for name, theirs in SamplingFields._ALIASES.items()} | {"num_predict": "max_tokens"}
    found = {ours.get(name, name): value for name, value in parameters.items() if value is not None}
    found = {name: value for name, value in found.items() if name in KINDS}
    if isinstance(found.get("stop"), str):
        found["stop"] = [found["stop"]]
    if isinstance(limit := found.get("max_tokens"), (int, float)) and limit < 1:
        found["max_tokens"] = UNLIMITED
    fields: Any = convert(found, SamplingFields, "parameters")
    params = fields.params()
    return {name: msgspec.to_builtins(getattr(params, name)) for name in found}


@routes.post("/api/copy", {"text/plain": {"type": "string"}}, CopyRequest, _STATUSES, **ERRORS)
async def copy(request: web.Request) -> web.Response:
    """Give a model another name, in Ollama's API; its file is not copied."""
    body = await read_json(request, CopyRequest)
    models = check_may_change(request)
    await models.create(_check_name("destination", body.destination), await _made_from(request, body.source))
    return web.Response()


@routes.delete("/api/delete", {"text/plain": {"type": "string"}}, _STATUSES, body=NameFields, **ERRORS)
async def delete(request: web.Request) -> web.Response:
    """Delete a created model, or the files of a pulled one, in Ollama's API."""
    body = await read_json(request, NameFields)
    models = check_may_change(request)
    entry = await models.entry(name_of(models, body.named), request.get(KEY))
    if (what := models.deletable(entry)) == "name":
        await models.delete_created(entry.name)
        return web.Response()
    folder = models.folder_of_models()
    if what is None:
        raise Conflict("model", f"{entry.name!r} was not pulled; remove its file from {folder.name}/ on the server")
    await models.unload(entry.name, request.get(KEY))
    await asyncio.to_thread(remove_model, entry.path, folder)
    await models.reload()
    log.info("deleted %s", entry.path)
    return web.Response()


# --- pull -----------------------------------------------------------------------------------------------------------


@routes.post("/api/pull", ProgressResponse, PullRequest, _STATUSES, lines=True, **ERRORS)
async def pull(request: web.Request) -> web.StreamResponse:
    """Download a model from the Hugging Face hub into the models folder, in Ollama's API."""
    body = await read_json(request, PullRequest)
    models = request.app[MODELS]
    known = name_of(models, body.named)
    if models.knows(known):
        await entry_of(request, known)  # raises if the key does not allow it
        return await _respond_with_progress(request, _steps("pulling manifest"), stream=body.stream)
    models = check_may_change(request)
    model = hub_model(known) or library_model(known)
    if model is None:
        raise ModelNotFound(
            f"{body.named!r:.200} not found: it is neither OWNER/REPO nor OWNER/REPO:TYPE on the Hugging Face hub, and "
            "not a name of Ollama's library with a known repository there"
        )
    return await _respond_with_progress(request, _pull(models, model, known), stream=body.stream)


async def _pull(models: ServedModels, model: HubModel, name: str) -> AsyncGenerator[ProgressResponse]:
    """Downloads a model with its projector, which is then served under this name too. Raises `ModelError` and
    `ConfigError`."""
    folder = models.folder_of_models()
    started: list[tuple[str, int, int]] = []  # file, bytes of the download, bytes that were there before

    def starts(file: str, n_bytes: int) -> None:
        started.append((file, n_bytes, bytes_so_far(model, folder)))

    yield ProgressResponse(status="pulling manifest")
    get = functools.partial(pull_whole, model, log.info, folder, starts, in_child=True)
    download = asyncio.ensure_future(child_processes.to_thread(get))
    n_shown = 0
    try:
        while not download.done():
            await asyncio.wait([download], timeout=0.3)
            n_whole = len(started) - (not download.done() or download.exception() is not None)
            for i, (file, n_bytes, before) in enumerate(started[n_shown:], n_shown):
                done = n_bytes if i < n_whole else await asyncio.to_thread(bytes_so_far, model, folder) - before
                completed = max(0, min(done, n_bytes))
                yield ProgressResponse(status=f"pulling {file}", digest=file, total=n_bytes, completed=completed)
            n_shown = max(n_shown, n_whole)
        path = download.result()
    finally:
        if download.cancel():  # the client is gone
            log.info("stopped pulling %s", model)
    yield ProgressResponse(status="writing manifest")
    await models.reload()
    if not models.knows(name):
        entries = await models.entries(None)
        if served := next((each for each in entries if each.path == path and not models.find_created(each.name)), None):
            await models.create(name, CreatedModel(base=served.name))
    yield ProgressResponse(status="success")


async def _steps(*statuses: str) -> AsyncGenerator[ProgressResponse]:
    for status in (*statuses, "writing manifest", "success"):
        yield ProgressResponse(status=status)


async def _respond_with_progress(
    request: web.Request, steps: AsyncGenerator[ProgressResponse], *, stream: bool | None
) -> web.StreamResponse:
    """Lines of a stream, which ends with an error if the work fails; without a stream, the last step.

    Raises `InvalidRequest` then.
    """
    if stream is False:
        try:
            *_, last = [step async for step in steps]
        except CppBatchError as error:
            raise error if isinstance(error, InvalidRequest) else InvalidRequest("model", str(error)) from error
        return json_response(last)
    response = web.StreamResponse(headers=STREAM_HEADERS | {"Content-Type": LINES})
    await response.prepare(request)
    try:
        async with contextlib.aclosing(steps):
            async for step in steps:
                await response.write(ServerSentEvent(step).as_line())
    except CppBatchError as error:
        known = error if isinstance(error, InvalidRequest) else InvalidRequest("model", str(error))
        await response.write(ServerSentEvent(ollama_error(api_error(known))).as_line())
    return response


# --- not supported --------------------------------------------------------------------------------------------------


@routes.post("/api/push", ProgressResponse, PullRequest, (400, 401, 413, 429, 503), **ERRORS)
async def push(_request: web.Request) -> web.Response:
    """Not supported: models are not published; always refused."""
    raise InvalidRequest("model", "cannot be pushed; upload its GGUF file to the Hugging Face hub")


@routes.post("/api/blobs/{digest}", ProgressResponse, None, (400, 401, 413, 429, 503), **ERRORS)
async def blob(_request: web.Request) -> web.Response:
    """Not supported: files are not uploaded; always refused."""
    raise InvalidRequest(
        "digest", "is refused: files cannot be uploaded; put the GGUF file into the models folder, or pull it"
    )
