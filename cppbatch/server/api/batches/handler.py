"""Runs the requests of batches on the engine, with the same responses as the requests' endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from cppbatch.engine.params import UNLIMITED, replace_fields
from cppbatch.engine.request import BACKGROUND
from cppbatch.errors import CppBatchError, EngineClosed, InvalidRequest, ModelLoadFailed
from cppbatch.jobs.batches.active_batch import BatchResources
from cppbatch.jobs.batches.records import BatchRecord
from cppbatch.jobs.job_request import JobRequest, JobResponse, RequestHandler
from cppbatch.jobs.job_runner import RequestSlots
from cppbatch.server.answer.response import ResponseBuilder
from cppbatch.server.api import embeddings, rerank
from cppbatch.server.api.openai import chat_completions, completions
from cppbatch.server.api.openai.completions import CompletionRequest, prepare_completion
from cppbatch.server.api.responses import create_response
from cppbatch.server.auth.key_usage import KEY_USAGE, KeyLineSlots
from cppbatch.server.auth.keys import KEY
from cppbatch.server.auth.rules import KeyRules
from cppbatch.server.fields.parse import read_json
from cppbatch.server.fields.sampling import SamplingFields, merge_fields
from cppbatch.server.fields.unknown import refuse_unknown, with_unknown
from cppbatch.server.http.api_errors import api_error, json_response
from cppbatch.server.http.error_formats import error_body
from cppbatch.server.models.served import MODELS, ModelLease, ServedModels
from cppbatch.server.models.serving import new_id
from cppbatch.server.observe.metrics import METRICS
from cppbatch.server.run_requests import OnEvent, run_requests
from cppbatch.server.storage import STORAGE
from cppbatch.typed_json import convert

_ENDPOINTS = {
    route.path: (route.endpoint.body, prepare)
    for module in (chat_completions, completions, create_response, embeddings, rerank)
    for route in module.routes
    if route.endpoint.body and (prepare := route.endpoint.prepare)
}

URLS = tuple(_ENDPOINTS)
"""The endpoints that batches support."""

ObserveEvents = Callable[[int, str], AbstractContextManager[OnEvent]]
"""Takes the number of a request's completions and the model. Returns a context that yields a callback for events."""


def _observe_nothing(_n: int, _model: str) -> AbstractContextManager[OnEvent]:
    return nullcontext(lambda index, event: None)


class BatchRequestHandler:
    """A `cppbatch.jobs.job_request.RequestHandler`. Raises `EngineClosed` when the engine is closed or has failed.

    A request waits while the engine's queue is full.
    """

    def __init__(
        self,
        models: ServedModels,
        *,
        defaults: dict[str, Any] | None = None,
        plain_max_tokens: int | None = None,
        rules: KeyRules | None = None,
        priority: int | None = None,
        default_model: str | None = None,
        load_patience: float = 0.0,
        observe: ObserveEvents = _observe_nothing,
    ) -> None:
        """`defaults`: body fields for requests that do not set them. `plain_max_tokens`: as in `FileJob`. `rules`:
        those of the requests' key. `priority`: overrides the requests' own. `default_model`: for requests that name no
        model; None: the server's default. `load_patience`: seconds for which
        requests wait while their model cannot be loaded; later ones fail until it is loaded. `observe`: for the events
        of each request."""
        self._models = models
        self._defaults = defaults or {}
        self._plain_max_tokens = plain_max_tokens
        self._rules = rules
        self._priority = priority
        self._default_model = default_model
        self._observe = observe
        self._load_patience = load_patience
        self._cannot_load_since: dict[str | None, float] = {}

    async def __call__(self, request: JobRequest) -> JobResponse:
        """The response of the request's endpoint, possibly an error."""
        request_id = new_id("req-")
        try:
            builder, body = await self._answer(request)
        except EngineClosed:
            raise
        except Exception as exception:
            error = api_error(exception)
            return JobResponse(status=error.status, request_id=request_id, body=error_body(request.url, error))
        tokens = builder.token_counts()
        return JobResponse(
            status=200,
            request_id=request_id,
            body=body,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            completion_tokens=tokens.completion,
        )

    async def _answer(self, request: JobRequest) -> tuple[ResponseBuilder, object]:
        """Prepares the request and returns the body of its response. Raises `InvalidRequest`."""
        kind, prepare = _ENDPOINTS[request.url]
        fields = request.body
        if issubclass(kind, SamplingFields):
            plain = {"max_tokens": self._plain_max_tokens} if request.is_plain and self._plain_max_tokens else {}
            fields = merge_fields(plain | self._defaults, fields)
        if kind is CompletionRequest and request.is_plain:  # OpenAI's 16 tokens make no sense for a plain prompt
            prepare = partial(prepare_completion, default_max_tokens=UNLIMITED)
        if fields.get("stream"):
            raise InvalidRequest("stream", "is true, but responses in a batch cannot be streamed; leave it out")
        try:
            body = convert(fields, kind)
        except InvalidRequest as error:
            if better := with_unknown(error, request.body, kind):
                raise better from error
            raise
        refuse_unknown(request.body, kind)  # excludes the defaults: a field similar to one of them is still a mistake
        with await self._lease(self._default_model if body.model is None else body.model) as lease:
            builder: ResponseBuilder = await prepare(body, lease.serving)
            requests = builder.requests
            if self._priority is not None:
                requests = [replace_fields(request, priority=self._priority) for request in requests]
            events = run_requests(
                lease.serving.client,
                lease.apply_key_rules(requests),
                n_candidates=builder.n_candidates,
                wait_when_full=True,
            )
            with self._observe(len(requests), lease.serving.name) as observe:
                return builder, await builder.gather(events, observe)

    async def _lease(self, model: str | None) -> ModelLease:
        while True:
            try:
                lease = await self._models.lease(model, self._rules, load=True)
            except ModelLoadFailed as error:
                now = time.monotonic()
                if now - self._cannot_load_since.setdefault(model, now) >= self._load_patience:
                    raise
                await asyncio.sleep(max(1.0, error.retry_after))
            else:
                self._cannot_load_since.pop(model, None)
                return lease


# --- batch background ------------------------------------------------------------------------------------------------
# Runs a server's batches while the application runs.


log = logging.getLogger("cppbatch.server")

_ENDPOINT = "/v1/batches"  # the metrics' endpoint label of the batches' requests


async def run_batches(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context of the application (`Application.cleanup_ctx`)."""
    storage = app[STORAGE]
    starting = asyncio.create_task(_start(app))
    yield
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    if storage.batches:
        await storage.batches.close()


async def _start(app: web.Application) -> None:
    """Starts the batches once the storage is open and the model is loaded."""
    models, observe = app[MODELS], partial(app[METRICS].observe, _ENDPOINT)
    batches = await app[STORAGE].opened()
    if batches is None:
        return

    try:
        await models.ready()
        request_slots = asyncio.Semaphore(await models.target_concurrency())
    except CppBatchError as error:
        log.info("batches cannot run: %s", error)  # the server reports the failure to load
        return
    usage = app[KEY_USAGE]

    def execution(record: BatchRecord) -> tuple[RequestHandler, RequestSlots]:
        rules = msgspec.convert(record.key, KeyRules) if record.key else None
        handler = BatchRequestHandler(
            models,
            rules=rules,
            priority=BACKGROUND,
            default_model=models.default_in_batch(record.batch.model),
            load_patience=600.0,  # memory may be short for some minutes
            observe=observe,
        )
        return handler, KeyLineSlots(request_slots, usage, rules) if rules else request_slots

    batches.start(BatchResources(models.serves_batch, execution))


# --- vertex predict --------------------------------------------------------------------------------------------------
# Vertex AI's predictions: one request that contains several, as sent to its containers.


_FORMAT = "@requestFormat"


class PredictRequest(msgspec.Struct, kw_only=True):
    """The body of a prediction."""

    instances: list[dict[str, Any]]
    """Request bodies, each with its endpoint in `@requestFormat`: `/v1/chat/completions` or `chatCompletions`."""


async def predict(request: web.Request) -> web.Response:
    """The responses, in the order of the instances; a failed instance has an error."""
    body = await read_json(request, PredictRequest)
    models = request.app[MODELS]
    limit = models.settings.limits.max_prompts_per_batch
    if len(body.instances) > limit:
        raise InvalidRequest("instances", f"has {len(body.instances)} requests; the limit is {limit}")
    requests = [_job_request(i, instance) for i, instance in enumerate(body.instances)]
    responses = await asyncio.gather(*map(BatchRequestHandler(models, rules=request.get(KEY)), requests))
    return json_response({"predictions": [response.body for response in responses]})


def _job_request(i: int, instance: dict[str, Any]) -> JobRequest:
    asked = instance.get(_FORMAT)
    url = asked if asked in URLS else _URLS_BY_FORMAT.get(str(asked))
    if url is None:
        names = ", ".join(_URLS_BY_FORMAT)
        raise InvalidRequest(f"instances[{i}].{_FORMAT}", f"is {asked!r}; it must be one of {names}")
    body = {name: value for name, value in instance.items() if name != _FORMAT}
    return JobRequest(line=i + 1, custom_id=str(i), url=url, body=body, content_hash=0)


def _format(url: str) -> str:
    """The endpoint's name in Vertex AI's clients: chatCompletions for /v1/chat/completions."""
    first, *others = url.removeprefix("/v1/").split("/")
    return first + "".join(other.title() for other in others)


_URLS_BY_FORMAT = {_format(url): url for url in URLS}
